"""Time statements in alternation: A B A B ..., so that disturbances of the machine affect all of them.

torch.utils.benchmark does the timing. A ratio is the median of the ratios of the rounds.
"""

import itertools
import math
import signal
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
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
        sides: for a ratio, the names of both sides; of several other sides, that of the fastest.
        note: for a ratio, where its bound holds, if it does not hold everywhere.
        spread: for a ratio, the range of its turns, without the slowest tenth (and without the fastest tenth, if it is
            a median): each divided by the other side's least time, or by the other side's time in the same turn.
    """

    what: str
    against: str
    measured: float | None
    at_most: float | None
    unit: str = ""
    times: tuple[float, float] | None = None
    skipped: str = ""
    threads: int = 0
    sides: tuple[str, str] = ("", "")
    note: str = ""
    spread: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        """Whether the figure is within its bound; true without a bound or a figure."""
        return self.measured is None or self.at_most is None or self.measured <= self.at_most


_library = ""
"""The library whose kernels are installed; empty if it is unknown."""


def kernels_of(library: str) -> bool:
    """Install or uninstall polycast's kernels, which also serve torch's regions while they are installed.

    Returns:
        Whether the other library's were installed before. The next call then does what is done once in a process.
    """
    global _library
    if library == "torch":
        polycast.uninstall()
    else:
        polycast.install("cpu")
    has_changed = library != _library
    _library = library
    return has_changed


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Side:
    """A statement with its names, and a context manager around it, which is not timed.

    Attributes:
        statement: the statement.
        names: its global names.
        around: makes the context manager.
        kernels: the library whose kernels its ops run on.
        per: how many times the statement does the measured work.
        may_be_slow: whether it is timed only once, or left out, if it takes many times the fastest side's time.
        prepare: makes what the statement needs, before the first time.
    """

    statement: str
    names: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    kernels: str = "polycast"
    per: int = 1
    may_be_slow: bool = False
    prepare: Callable[[], object] = nothing

    def time(self, calls: int) -> float:
        """Return the seconds of a call."""
        kernels_of(self.kernels)
        timer = Timer(self.statement, globals=dict(self.names), num_threads=torch.get_num_threads())
        with self.around():
            return timer.timeit(calls).median / self.per


@dataclass(frozen=True)
class LongSide(Side):
    """A side whose statement takes long: it is timed without the two calls that torch's timer makes before.

    One call is made before if the kernels have changed. Regions with recipes then change torch's code and choose again,
    which takes some milliseconds.
    """

    def time(self, calls: int) -> float:
        """Return the seconds of a call."""
        has_changed = kernels_of(self.kernels)
        timer = timeit.Timer(self.statement, globals=dict(self.names))
        with self.around():
            if has_changed and (calls > 1 or not self.may_be_slow):
                timer.timeit(1)
            return timer.timeit(calls) / calls / self.per


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sides of a race, and its bound, if it has one.

    Attributes:
        what: the measured quantity.
        against: the baseline.
        ours: the name of a side.
        theirs: the name of the other side, or of several, of which the fastest is the other side.
        at_most: the bound of the ratio.
        where: two sides and a number: the bound holds only where the first takes at least the number times the
            second's time.
    """

    what: str
    against: str
    ours: str
    theirs: str | Sequence[str]
    at_most: float | None
    where: tuple[str, str, float] | None = None

    @property
    def others(self) -> Sequence[str]:
        """The names of the other sides."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def note(self) -> str:
        """Where the bound holds; empty if it holds everywhere."""
        if self.where is None:
            return ""
        slower, faster, least = self.where
        return f"{self.at_most:.4g} where {slower} takes at least {least:.4g} of {faster}'s time"


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
        once: the seconds of sides that are timed only once, because they are slow.
        left_out: sides that are left out, and the reason.
        bases: by side, the side that does the same work in each process, and so tells how fast the process is.
    """

    ratios: Sequence[Ratio]
    rounds: int = 40
    most_seconds: float = 10.0
    mean: str = ""
    mean_at_most: float | None = None
    once: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)

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
        typical: Callable[[Iterable[float]], float] = min if least else statistics.median
        rounds = [*taken, self.once] if self.once else taken
        names = {name for times in rounds for name in times}
        seconds = {name: typical([times[name] for times in rounds if name in times]) for name in names}
        results = [self._result(ratio, taken, seconds, least) for ratio in self.ratios]
        if self.mean:
            mean = statistics.geometric_mean(each.measured for each in results if each.measured is not None)
            results.append(Result(self.mean, results[0].against, mean, self.mean_at_most))
        return results

    def _result(
        self, ratio: Ratio, taken: Sequence[Mapping[str, float]], seconds: Mapping[str, float], least: bool
    ) -> Result:
        others = [name for name in ratio.others if name in seconds]
        at_most = ratio.at_most if self._holds(ratio, seconds) else None
        sides = ratio.ours, min(others or ratio.others, key=lambda name: seconds.get(name, math.inf))
        unmeasured = Result(ratio.what, ratio.against, None, at_most, sides=sides, note=ratio.note)
        if ratio.ours not in seconds or not others:
            missing = next(name for name in (ratio.ours, *ratio.others) if name not in seconds)
            return replace(unmeasured, skipped=f"{missing} is left out: {self.left_out[missing]}")
        ours, theirs = (seconds[name] for name in sides)
        by_round = [times[sides[0]] / times[sides[1]] for times in taken if times.keys() >= {*sides}]
        measured = ours / theirs if least or not by_round else statistics.median(by_round)
        turns = [times[sides[0]] / theirs for times in taken if sides[0] in times] if least else by_round
        deciles = statistics.quantiles(turns, n=10, method="inclusive") if len(turns) > 1 else [measured]
        spread = (measured if least else deciles[0], deciles[-1])
        return replace(unmeasured, measured=measured, times=(ours, theirs), spread=spread)

    def _holds(self, ratio: Ratio, seconds: Mapping[str, float]) -> bool:
        """Return whether the bound of a ratio holds here. A side that is left out takes forever."""
        if ratio.where is None:
            return True
        slower, faster, least = ratio.where
        return seconds.get(slower, math.inf) >= least * seconds.get(faster, math.inf)


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
        return Plan(**{each.name: getattr(self, each.name) for each in fields(Plan)})

    def run(self, quick: bool) -> list[Result]:
        """Return the results of all rounds."""
        race, calls = self.warmed_up(self.sides)
        names = list(calls)
        taken: list[dict[str, float]] = []
        for turn in self.turns(quick):
            first = turn % len(names)
            taken.append({name: self.sides[name].time(calls[name]) for name in (*names[first:], *names[:first])})
        return race.plan().results(taken, least=self.least)

    def races(self) -> Iterator["Race"]:
        """Yield this race, for the interface of :class:`Several`."""
        yield self

    def warmed_up(self, names: Iterable[str]) -> tuple["Race", dict[str, int]]:
        """Warm up sides. Return the race with what was slow, and the number of calls in a turn of each other side."""
        calls: dict[str, int] = {}
        once: dict[str, float] = {}
        left_out: dict[str, str] = {}
        fastest = math.inf
        for name in names:
            side = self.sides[name]
            side.prepare()
            limit = max(_VERY_SLOW * fastest, _SHORT) if side.may_be_slow else math.inf
            try:
                with time_limit(limit):
                    seconds = side.time(1)
            except TimeoutError:
                left_out[name] = f"over {limit / fastest:.0f} times the fastest side's time"
                continue
            except RuntimeError as error:
                left_out[name] = f"torch raises {str(error).partition('. ')[0]!r}"
                continue
            if side.may_be_slow and seconds > _SLOW * fastest:
                seconds = min(seconds, side.time(1))
            if side.may_be_slow and seconds > _SLOW * fastest:
                once[name] = seconds
                continue
            if seconds * side.per < self.seconds:
                seconds = side.time(10)
            fastest = min(fastest, seconds)
            calls[name] = max(1, round(self.seconds / (seconds * side.per)))
        return replace(self, once=once, left_out=left_out), calls


_SLOW, _VERY_SLOW, _SHORT = 3, 5, 2.0
"""A side that may be slow is timed once beyond `_SLOW` times the fastest side's time, and left out beyond `_VERY_SLOW`
times if that takes over `_SHORT` seconds."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after a time, where the platform has interval timers."""
    if seconds == math.inf or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
