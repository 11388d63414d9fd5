"""Time statements in alternation: A B A B ..., so that disturbances of the machine affect all of them.

torch.utils.benchmark does the timing. A ratio is the median of the ratios of the rounds.
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
        what: the measured quantity.
        against: the baseline.
        measured: the figure; None if it could not be measured.
        at_most: its bound; None if it has none.
        unit: the unit of the figure, with a leading space; empty for a ratio.
        times: for a ratio, the seconds of both sides.
        skipped: the reason why it could not be measured.
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
        """Whether the figure is within its bound; true without a bound or a figure."""
        return self.measured is None or self.at_most is None or self.measured <= self.at_most


def kernels_of(library: str) -> None:
    """Install or uninstall polycast's kernels, which also serve torch's regions while they are installed."""
    if library == "torch":
        polycast.uninstall()
    else:
        polycast.install("cpu")


@dataclass(frozen=True)
class Side:
    """A statement with its names, and a context manager around it, which is not timed.

    Its ops run on the kernels of the library `kernels`. The statement does the measured work `per` times.
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
    """A ratio of two sides of a race, and its bound, if it has one."""

    what: str
    against: str
    ours: str
    theirs: str
    at_most: float | None


@dataclass(frozen=True)
class Skipped:
    """Ratios that cannot be measured here, and the reason."""

    ratios: Sequence[Ratio]
    reason: str

    def run(self, quick: bool) -> list[Result]:
        """Return the results, without figures."""
        return [Result(each.what, each.against, None, each.at_most, skipped=self.reason) for each in self.ratios]


@dataclass(frozen=True)
class Plan:
    """A race without its sides.

    Attributes:
        ratios: the ratios to measure.
        rounds: the number of rounds.
        most_seconds: the time after which no further round begins, except for the first `FEWEST`.
        mean: the name of the geometric mean of the ratios, if it is a result too.
        mean_at_most: the bound of the mean.
    """

    ratios: Sequence[Ratio]
    rounds: int = 40
    most_seconds: float = 10.0
    mean: str = ""
    mean_at_most: float | None = None

    def turns(self, quick: bool) -> Iterator[int]:
        """Yield the number of each round, as long as there is time."""
        rounds, most_seconds = (self.rounds // 5, self.most_seconds / 5) if quick else (self.rounds, self.most_seconds)
        start = time.perf_counter()
        for turn in itertools.count():
            if turn >= FEWEST and (turn >= rounds or time.perf_counter() - start > most_seconds):
                return
            yield turn

    def results(self, taken: Sequence[Mapping[str, float]], *, least: bool = False) -> list[Result]:
        """Return the ratios from the seconds of all rounds: their median, or the ratio of the minima."""
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
"""The minimum number of rounds."""


@dataclass(frozen=True)
class Race(Plan):
    """Sides that are timed in alternation; a turn takes about `seconds`."""

    sides: Mapping[str, Side] = field(default_factory=dict)
    seconds: float = 0.01
    least: bool = False

    def plan(self) -> Plan:
        """Return the plan, without the sides."""
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
        """Yield this race, for the interface of :class:`Several`."""
        yield self

    def calls(self, side: Side) -> int:
        """Return the number of calls in a turn of a side, after a warm-up."""
        once = side.time(1) * side.per
        if once < self.seconds:
            once = side.time(10) * side.per
        return max(1, round(self.seconds / once))


@dataclass(frozen=True)
class Several:
    """A sequence of races, each made just before it runs."""

    make: Callable[[], Iterator[Race] | Iterator[Race | Skipped]]

    def races(self) -> Iterator[Race | Skipped]:
        """Yield the races."""
        yield from self.make()

    def run(self, quick: bool) -> list[Result]:
        """Return the results of all races."""
        return [result for race in self.races() for result in race.run(quick)]
