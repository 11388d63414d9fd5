"""Time statements side by side: A B A B ..., so that what disturbs the machine disturbs all of them.

torch.utils.benchmark does the timing; a ratio is the median of the ratios of the rounds.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.benchmark import Timer

import polycast


@dataclass(frozen=True)
class Result:
    """A figure.

    Attributes:
        what: what was measured.
        against: what it is compared with.
        measured: the figure; None if it could not be measured.
        at_most: its bound; None if it has none.
        unit: the unit of the figure, with a leading space; empty for a ratio.
        times: the seconds of both sides, of a ratio.
        skipped: why it could not be measured.
        threads: the number of torch's threads.
    """

    what: str
    against: str
    measured: float | None
    at_most: float | None
    unit: str = ""
    times: tuple[float, float] | None = None
    skipped: str = ""
    threads: int = 0

    @property
    def ok(self) -> bool:
        """Whether the figure is within its bound, as one without a bound or without a figure is."""
        return self.measured is None or self.at_most is None or self.measured <= self.at_most


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
    """A ratio of two sides of a race, by their names, and its bound, if it has one."""

    what: str
    against: str
    ours: str
    theirs: str
    at_most: float | None


@dataclass(frozen=True)
class Skipped:
    """Ratios that cannot be measured here, and why."""

    ratios: Sequence[Ratio]
    reason: str

    def run(self, quick: bool) -> list[Result]:
        """Return the results, which have no figures."""
        return [Result(each.what, each.against, None, each.at_most, skipped=self.reason) for each in self.ratios]


@dataclass(frozen=True)
class Plan:
    """The ratios of a race and how long it takes: what can be known of it without its sides.

    Attributes:
        ratios: what is to be known.
        rounds: how often each side has a turn.
        most_seconds: how long all turns may take; after that there are `FEWEST` rounds or as many as there were.
        mean: what the geometric mean of the ratios is called, if it is a result too.
        mean_at_most: the bound of that mean.
    """

    ratios: Sequence[Ratio]
    rounds: int = 40
    most_seconds: float = 10.0
    mean: str = ""
    mean_at_most: float | None = None

    def turns(self, quick: bool) -> Iterator[int]:
        """Yield the number of each round, while there is time for another."""
        rounds, most_seconds = (self.rounds // 5, self.most_seconds / 5) if quick else (self.rounds, self.most_seconds)
        start = time.perf_counter()
        for turn in itertools.count():
            if turn >= FEWEST and (turn >= rounds or time.perf_counter() - start > most_seconds):
                return
            yield turn

    def results(self, taken: Sequence[Mapping[str, float]], *, least: bool = False) -> list[Result]:
        """Return the ratios from the seconds of all rounds: their median, or the ratio of the least."""
        results = [self._result(ratio, taken, least) for ratio in self.ratios]
        if self.mean:
            mean = statistics.geometric_mean(each.measured for each in results if each.measured is not None)
            results.append(Result(self.mean, results[0].against, mean, self.mean_at_most))
        return results

    def _result(self, ratio: Ratio, taken: Sequence[Mapping[str, float]], least: bool) -> Result:
        typical: Callable[..., float] = min if least else statistics.median
        ours, theirs = (typical([times[name] for times in taken]) for name in (ratio.ours, ratio.theirs))
        by_round = [times[ratio.ours] / times[ratio.theirs] for times in taken]
        measured = ours / theirs if least else statistics.median(by_round)
        return Result(ratio.what, ratio.against, measured, ratio.at_most, times=(ours, theirs))


FEWEST = 3
"""The fewest rounds."""


@dataclass(frozen=True)
class Race(Plan):
    """Sides that are timed in turns; `seconds` is about what one turn takes."""

    sides: Mapping[str, Side] = field(default_factory=dict)
    seconds: float = 0.01
    least: bool = False

    def plan(self) -> Plan:
        """Return what is known without the sides."""
        return Plan(self.ratios, self.rounds, self.most_seconds, self.mean, self.mean_at_most)

    def run(self, quick: bool) -> list[Result]:
        """Return the results of all rounds."""
        calls = {name: self.calls(side) for name, side in self.sides.items()}
        names = list(self.sides)
        taken: list[dict[str, float]] = []
        for turn in self.turns(quick):
            first = turn % len(names)
            taken.append({name: self.sides[name].time(calls[name]) for name in (*names[first:], *names[:first])})
        return self.results(taken, least=self.least)

    def races(self) -> Iterator["Race"]:
        """Yield the one race that this is, as :class:`Several` has more."""
        yield self

    def calls(self, side: Side) -> int:
        """Return how often a side is called in a turn, after its first casts and what is made at the first call."""
        once = side.time(1) * side.per
        if once < self.seconds:
            once = side.time(10) * side.per
        return max(1, round(self.seconds / once))


@dataclass(frozen=True)
class Several:
    """Races that are made and run one after the other."""

    make: Callable[[], Iterator[Race] | Iterator[Race | Skipped]]

    def races(self) -> Iterator[Race | Skipped]:
        """Make one after the other."""
        yield from self.make()

    def run(self, quick: bool) -> list[Result]:
        """Return the results of all."""
        return [result for race in self.races() for result in race.run(quick)]
