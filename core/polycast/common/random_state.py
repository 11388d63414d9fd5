"""`RandomState`: the random number generators that a model on a device draws from."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """The generators of the CPU and of a device; those of its current device, if it is given without an index."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        on_device = torch.get_device_module(device)
        self._module = on_device if device.type != "cpu" and hasattr(on_device, "get_rng_state") else None
        self._device = () if device.index is None else (device,)

    def get(self) -> list[torch.Tensor]:
        """Return the current states."""
        on_device = [] if self._module is None else [self._module.get_rng_state(*self._device)]
        return [torch.get_rng_state(), *on_device]

    def set(self, states: list[torch.Tensor]) -> None:
        """Set the states."""
        on_cpu, *on_device = states
        torch.set_rng_state(on_cpu)
        for state in on_device:
            assert self._module is not None
            self._module.set_rng_state(state, *self._device)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the current states after a block."""
        before = self.get()
        try:
            yield
        finally:
            self.set(before)
