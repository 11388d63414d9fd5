"""Every op of the CPU's table on small inputs: what it costs in a region, against another.

Here the ops take turns inside a turn of each region, for kernels are put in place for all of them at once.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

import polycast
from polycast.testing.samples import SAMPLES, split

from .timing import Result, kernels_of

NOT_SLOWER = 1.03
"""At most torch's time; the rest is the machine's noise."""
_BINDINGS = (torch._C._VariableFunctions, torch._C._nn, torch._C._fft, torch._C._linalg)


class _Make:
    """Makes the tensors of the samples; see polycast.testing.samples.Maker."""

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape) * 0.8 + 0.1

    def spd(self, size: int) -> torch.Tensor:
        half = self(size, size)
        return half @ half.T + torch.eye(size)

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape)

    def integers(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)


def _function(op: str) -> Callable[..., Any]:
    """Return what Python calls an op by: its binding, which passes no stack."""
    base = op.removeprefix("aten::").partition(".")[0]
    for bindings in _BINDINGS:
        if hasattr(bindings, base):
            function: Callable[..., Any] = getattr(bindings, base)
            return function
    packet: Callable[..., Any] = getattr(torch.ops.aten, base)
    return packet


def _timers() -> dict[str, Timer]:
    """Return a timer for each op of the table that can be called."""
    timers = {}
    for op in polycast.get_backend("cpu").policies:
        if op not in SAMPLES:
            continue
        arguments, keywords = split(SAMPLES[op](_Make()))
        names = {"function": _function(op), "arguments": arguments, "keywords": keywords}
        try:
            names["function"](*arguments, **keywords)
        except (RuntimeError, TypeError, AttributeError):  # this build or this version of torch lacks it
            continue
        timers[op] = Timer("function(*arguments, **keywords)", globals=names, num_threads=1)
    return timers


@dataclass(frozen=True)
class EveryOp:
    """The time of each op in our region and in theirs, the least of all rounds."""

    ours: AbstractContextManager[Any]
    theirs: AbstractContextManager[Any]
    kernels: tuple[str, str]
    """The libraries whose kernels run in our region and in theirs."""
    what: str
    against: str
    at_most: float
    of_all: float
    """The bound of the geometric mean of all ops."""
    rounds: int = 60
    seconds: float = 0.001
    """About what one op takes in one turn."""

    def run(self, quick: bool) -> Iterator[list[Result]]:
        """Yield after each round, at last with the results."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has deprecated some of the ops
            timers = _timers()
            calls = {op: max(1, round(self.seconds / timer.timeit(10).median)) for op, timer in timers.items()}
            sides = [*zip((self.ours, self.theirs), self.kernels, strict=True)]
            least: dict[tuple[str, int], float] = {}
            for turn in range(max(3, self.rounds // 5) if quick else self.rounds):
                for side in (turn % 2, 1 - turn % 2):
                    region, library = sides[side]
                    kernels_of(library)
                    with torch.no_grad(), region:
                        for op, timer in timers.items():
                            taken = timer.timeit(calls[op]).median
                            least[op, side] = min(taken, least.get((op, side), math.inf))
                yield []
        times = {op: (least[op, 0], least[op, 1]) for op in timers}
        ratios = {op: ours / theirs for op, (ours, theirs) in times.items()}
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        what = f"the geometric mean of {len(ratios)} ops{self.what}"
        yield [
            *(
                Result(op + self.what, self.against, ratio, self.at_most, times=times[op])
                for op, ratio in ratios.items()
            ),
            Result(what, self.against, mean, self.of_all),
        ]


def against_torch() -> EveryOp:
    regions = polycast.autocast("cpu"), torch.autocast("cpu")
    return EveryOp(*regions, ("polycast", "torch"), "", "torch's kernel", NOT_SLOWER, 1.0)


def under_policy() -> EveryOp:
    """Each op under a policy that says of all ops what the table says."""
    regions = polycast.autocast("cpu", policy=polycast.get_backend("cpu").policies), polycast.autocast("cpu")
    what, against = ", named in a policy", "a plain region"
    return EveryOp(*regions, ("polycast", "polycast"), what, against, 1.05, 1.01, rounds=120)
