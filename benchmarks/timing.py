"""Time statements side by side: A B A B ..., so that what disturbs the machine disturbs all of them.

torch.utils.benchmark does the timing; a ratio is the median of the ratios of the rounds.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.benchmark import Timer

import polycast


@dataclass(frozen=True)
class Result:
    """A figure and the bound that it should keep; `times` are the median seconds of both sides, where it is a ratio.

    `skipped` is why it could not be measured here: then there is no figure.
    """

    what: str
    against: str
    measured: float | None
    at_most: float
    unit: str = ""
    times: tuple[float, float] | None = None
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return self.measured is None or self.measured <= self.at_most


def kernels_of(library: str) -> None:
    """Put the kernels of polycast or of torch in place: polycast's serve torch's regions too while they are there."""
    if library == "torch":
        polycast.uninstall()
    else:
        polycast.install("cpu")


@dataclass(frozen=True)
class Side:
    """A statement with the names in it, and what is entered around it, which is not timed.

    Its ops run on the kernels of the library `kernels`. `per` is how often the statement does what is measured.
    """

    statement: str
    names: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    kernels: str = "polycast"
    per: int = 1

    def time(self, calls: int) -> float:
        """Return the seconds of a call."""
        kernels_of(self.kernels)
        timer = Timer(self.statement, globals=dict(self.names), num_threads=torch.get_num_threads())
        with self.around():
            return timer.timeit(calls).median / self.per


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sides of a race, by their names."""

    what: str
    against: str
    ours: str
    theirs: str
    at_most: float


@dataclass(frozen=True)
class Skipped:
    """Ratios that cannot be measured here, and why."""

    ratios: Sequence[Ratio]
    reason: str

    def run(self, quick: bool) -> Iterator[list[Result]]:
        """Yield the results, which have no figures."""
        yield [Result(each.what, each.against, None, each.at_most, skipped=self.reason) for each in self.ratios]


@dataclass(frozen=True)
class Race:
    """Sides that are timed in turns, and the ratios that are asked for; `seconds` is about what one turn takes."""

    sides: Mapping[str, Side]
    ratios: Sequence[Ratio]
    rounds: int = 40
    seconds: float = 0.01

    def run(self, quick: bool) -> Iterator[list[Result]]:
        """Yield after each round, at last with the results."""
        calls = {name: self.calls(side) for name, side in self.sides.items()}
        names = list(self.sides)
        taken: list[dict[str, float]] = []
        for turn in range(self.turns(quick)):
            first = turn % len(names)
            taken.append({name: self.sides[name].time(calls[name]) for name in (*names[first:], *names[:first])})
            yield []
        yield self.results(taken)

    def races(self) -> Iterator["Race"]:
        """Return the one race that this is, as :class:`Several` has more."""
        yield self

    def turns(self, quick: bool) -> int:
        return max(3, self.rounds // 5) if quick else self.rounds

    def calls(self, side: Side) -> int:
        """Return how often a side is called in a turn, after its first casts and what is made at the first call."""
        once = side.time(1) * side.per
        if once < self.seconds:
            once = side.time(10) * side.per
        return max(1, round(self.seconds / once))

    def results(self, taken: Sequence[Mapping[str, float]], *, least: bool = False) -> list[Result]:
        """Return the ratios from the seconds of all rounds: their median, or the ratio of the least."""
        return [self._result(ratio, taken, least) for ratio in self.ratios]

    def _result(self, ratio: Ratio, taken: Sequence[Mapping[str, float]], least: bool) -> Result:
        typical: Callable[..., float] = min if least else statistics.median
        ours, theirs = (typical([times[name] for times in taken]) for name in (ratio.ours, ratio.theirs))
        by_round = [times[ratio.ours] / times[ratio.theirs] for times in taken]
        measured = ours / theirs if least else statistics.median(by_round)
        return Result(ratio.what, ratio.against, measured, ratio.at_most, times=(ours, theirs))
