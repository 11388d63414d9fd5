"""Run a step again to find the first op that produced inf or nan, and leave no trace of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from polycast.common.random_state import RandomState
from polycast.region.scaler_history import Origin

from .observe import observe_step
from .step_reading import first_nonfinite

SameRandomNumbers: TypeAlias = Callable[[], AbstractContextManager[None]]


def same_random_numbers(model: nn.Module | None) -> SameRandomNumbers:
    """Return a function that opens a block, which draws the same random numbers as the code after this call."""
    generators = RandomState("cpu", () if model is None else chain(model.parameters(), model.buffers()))
    states = generators.get()

    @contextmanager
    def block() -> Iterator[None]:
        with generators.preserved():
            generators.set(states)
            yield

    return block


def rerun_step(step: Callable[[], Any], model: nn.Module | None, random: SameRandomNumbers) -> Origin | None:
    """Rerun a step, and return the first op that produced inf or nan; None if none did."""
    observed = observe_step(model, nonfinite="record", stacks=True)
    with random(), _restored(model), observed:
        step()
    return None if observed.reading is None else first_nonfinite(observed.reading)


@contextmanager
def _restored(model: nn.Module | None) -> Iterator[None]:
    """Run a block without gradients; restore gradients and buffers after it."""
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
