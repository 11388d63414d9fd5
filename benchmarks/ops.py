"""Every op of the CPU's table on small inputs: what its kernel at the Autocast key costs, against torch's own.

Here the ops take turns inside a turn of each library, for kernels are put in place for all of them at once.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

import polycast
from polycast.testing.samples import SAMPLES, split

from .once import LIBRARIES
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
    """The time of each op, the least of all rounds."""

    rounds: int = 60
    seconds: float = 0.001
    """About what one op takes in one turn."""

    def run(self, quick: bool) -> Iterator[list[Result]]:
        """Yield after each round, at last with the results."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has deprecated some of the ops
            timers = _timers()
            calls = {op: max(1, round(self.seconds / timer.timeit(10).median)) for op, timer in timers.items()}
            least: dict[tuple[str, str], float] = {}
            for turn in range(max(3, self.rounds // 5) if quick else self.rounds):
                for name in sorted(LIBRARIES, reverse=turn % 2 == 0):
                    kernels_of(name)
                    with torch.no_grad(), LIBRARIES[name].autocast("cpu"):
                        for op, timer in timers.items():
                            taken = timer.timeit(calls[op]).median
                            least[op, name] = min(taken, least.get((op, name), math.inf))
                yield []
        times = {op: (least[op, "polycast"], least[op, "torch"]) for op in timers}
        ratios = {op: ours / theirs for op, (ours, theirs) in times.items()}
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        against = "torch's kernel"
        yield [
            *(Result(op, against, ratio, NOT_SLOWER, times=times[op]) for op, ratio in ratios.items()),
            Result(f"the geometric mean of {len(ratios)} ops", against, mean, 1.0),
        ]
