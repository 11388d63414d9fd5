"""Run a step again to find the first op that produced inf or nan, and leave no trace of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..region.scaler_history import Origin
from .observe import observe_step


class RandomState:
    """The state of the random number generators of the CPU and of a model's device, when it is made."""

    def __init__(self, model: nn.Module | None) -> None:
        device = next(model.parameters(), torch.empty(0)).device if model is not None else torch.device("cpu")
        self._device = None if device.type == "cpu" else device
        self._state = self._read()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_device = None if self._device is None else torch.get_device_module(self._device).get_rng_state(self._device)
        return torch.get_rng_state(), on_device

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same random numbers in a block as after this object was made."""
        now = self._read()
        self._write(self._state)
        try:
            yield
        finally:
            self._write(now)

    def _write(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        on_cpu, on_device = state
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            torch.get_device_module(self._device).set_rng_state(on_device, self._device)


def rerun_step(step: Callable[[], Any], model: nn.Module | None, random: RandomState) -> Origin | None:
    """Return the first op of a step that produced inf or nan, which is run again for that; None: it did not happen."""
    observed = observe_step(model, nonfinite="record", stacks=True)
    with random.again(), _restored(model), observed:
        step()
    return None if observed.reading is None else observed.reading.origin()


@contextmanager
def _restored(model: nn.Module | None) -> Iterator[None]:
    """Restore gradients and buffers."""
    parameters = [] if model is None else list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [] if model is None else [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
