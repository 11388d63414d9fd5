"""`RandomState`: the random number generators that a model draws from."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomState:
    """The generators of the CPU, of the current device of a type, and of the devices of some tensors."""

    def __init__(self, device_type: str, tensors: Iterable[torch.Tensor] = ()) -> None:
        devices = dict.fromkeys([torch.device(device_type), *(tensor.device for tensor in tensors)])
        self._on_devices = [found for device in devices if (found := _generator_of(device)) is not None]

    def get(self) -> list[torch.Tensor]:
        """Return the current states."""
        return [torch.get_rng_state(), *(module.get_rng_state(*index) for module, index in self._on_devices)]

    def set(self, states: list[torch.Tensor]) -> None:
        """Set the states."""
        on_cpu, *on_devices = states
        torch.set_rng_state(on_cpu)
        for (module, index), state in zip(self._on_devices, on_devices, strict=True):
            module.set_rng_state(state, *index)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the current states after a block."""
        before = self.get()
        try:
            yield
        finally:
            self.set(before)


def _generator_of(device: torch.device) -> tuple[Any, tuple[torch.device, ...]] | None:
    """Return the module with the generator of a device, and the arguments that name it; None if there is none.

    Modules of types with one device, such as torch.mps, take no argument.
    """
    module = getattr(torch, device.type, None)
    if not hasattr(module, "get_rng_state"):
        return None
    has_several = getattr(module, "device_count", lambda: 1)() > 1
    return module, (device,) if has_several and device.index is not None else ()
