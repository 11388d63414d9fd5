"""Ways to run a model, and cases: a model and what is done with it, in whichever way."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import polycast

from .timing import Race, Ratio, Side, nothing

Made = tuple[nn.Module, torch.Tensor]
"""A model and its input."""
Autocast = Callable[..., AbstractContextManager[Any]]
Forward = Callable[[nn.Module, torch.Tensor, Autocast], object]


def no_region(*_: object, **__: object) -> AbstractContextManager[None]:
    """Return a context manager that does nothing, in place of a region."""
    return nullcontext()


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Attributes:
        autocast: makes the region, from a device type and perhaps a dtype.
        kernels: the library whose kernels run.
        copied: whether a copy of the model in the fast dtype runs.
        trains: whether models are trained in this way.
        may_be_slow: whether it is timed only once, or left out, where it is much slower than others.
    """

    autocast: Autocast
    kernels: str
    copied: bool = False
    trains: bool = True
    may_be_slow: bool = False


LIBRARIES = {
    "polycast": Way(polycast.autocast, "polycast"),
    "torch": Way(torch.autocast, "torch"),
}


def run_whole(model: nn.Module, x: torch.Tensor, autocast: Autocast) -> object:
    """Run a model in one region, for the device of its input."""
    with autocast(x.device.type):
        return model(x)


def loss_of(out: Any) -> torch.Tensor:
    """Return a loss of a model's output."""
    values = out if isinstance(out, torch.Tensor) else out[0]
    loss: torch.Tensor = values.float().square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


@dataclass(frozen=True)
class Inference:
    """A forward pass; all ways share one model, and the copy is made when it first runs.

    Attributes:
        what: its name.
        make: returns the model and the input.
        trainable: whether the weights require gradients.
        around: makes the context manager around it, which is not timed.
        forward: runs the model.
        dtype: the fast dtype.
        options: of the race.
    """

    what: str
    make: Callable[[], Made]
    trainable: bool = False
    around: Callable[[], AbstractContextManager[Any]] = torch.no_grad
    forward: Forward = run_whole
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = field(default_factory=dict)

    def sides(self, ways: Mapping[str, Way], kind: type[Side] = Side) -> dict[str, Side]:
        """Return a side for each way."""
        torch.manual_seed(0)
        model, x = self.make()
        model.requires_grad_(self.trainable)

        @functools.cache
        def copied() -> nn.Module:
            return copy.deepcopy(model).to(self.dtype)

        narrow = x.to(self.dtype) if x.is_floating_point() else x

        def side(way: Way) -> Side:
            def run() -> object:
                return self.forward(copied() if way.copied else model, narrow if way.copied else x, way.autocast)

            about = {"kernels": way.kernels, "may_be_slow": way.may_be_slow}
            return kind("run()", {"run": run}, self.around, **about, prepare=copied if way.copied else nothing)

        return {name: side(way) for name, way in ways.items()}


@dataclass(frozen=True)
class Training:
    """A training step; each way has a model of its own, made when it first runs.

    Attributes:
        what: its name.
        make: returns the model, in training mode, and the input.
        optimizer: makes the optimizer.
        batches: the number of batches in a step.
        loss: returns the loss of the model's output.
        options: of the race.
    """

    what: str
    make: Callable[[], Made]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    batches: int = 1
    loss: Callable[[Any], torch.Tensor] = loss_of
    options: Mapping[str, Any] = field(default_factory=dict)

    def functions(self, way: Way) -> tuple[Callable[[], object], Callable[[], None]]:
        """Return a function that makes the model, and one that makes a step."""

        @functools.cache
        def made() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model, x = self.make()
            return model.train(), x, self.optimizer(model)

        def step() -> None:
            model, x, optimizer = made()
            optimizer.zero_grad()
            for _ in range(self.batches):
                with way.autocast(x.device.type):
                    loss = self.loss(model(x)) / self.batches
                loss.backward()
            optimizer.step()

        return made, step

    def sides(self, ways: Mapping[str, Way], kind: type[Side] = Side) -> dict[str, Side]:
        """Return a side for each way in which models are trained."""
        sides = {}
        for name, way in ways.items():
            if way.trains:
                prepare, step = self.functions(way)
                about = {"kernels": way.kernels, "may_be_slow": way.may_be_slow, "prepare": prepare}
                sides[name] = kind("step()", {"step": step}, **about)
        return sides


Case = Inference | Training


def races(cases: Sequence[Case], at_most: float) -> Iterator[Race]:
    """Yield the race of both libraries for each case."""
    for case in cases:
        ratio = Ratio(case.what, "torch.autocast", "polycast", "torch", at_most)
        yield Race([ratio], sides=case.sides(LIBRARIES), **case.options)
