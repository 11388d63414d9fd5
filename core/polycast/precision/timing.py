"""Time a model in several precisions, in alternating rounds, and compare medians."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..policy.value import Policy
from ..region.autocast import autocast
from ..region.module_rules import apply_policy

_SECONDS = 0.02
"""The approximate duration of a turn."""
_ROUNDS = 15
_SLOW_ROUNDS = 7
_SLOW = 0.2
"""Calls that take this many seconds or more are timed in fewer rounds."""


@dataclass(frozen=True)
class Timings:
    """The seconds of a call of the model, by the way it was run, as medians of `rounds` rounds; and the chosen way."""

    seconds: Mapping[str, float]
    chosen: str
    rounds: int

    def lines(self) -> list[str]:
        """Return the timings as lines of text."""
        return [
            "ms per call: " + ", ".join(f"{name} {each * 1e3:.3g}" for name, each in self.seconds.items()),
            f"chosen: {self.chosen}; medians of {self.rounds} alternating rounds",
        ]


def median(values: Iterable[float]) -> float:
    """Return the median, without importing statistics, which takes as long as importing the rest of this package."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _synchronize_of(device_type: str) -> Callable[[], object]:
    """Return the function that waits for the work of a device."""
    synchronize: Callable[[], object] = getattr(torch.get_device_module(device_type), "synchronize", lambda: None)
    return synchronize


class Race:
    """Times sides in alternating rounds, so that disturbances of the machine affect all of them."""

    def __init__(self, device_type: str, sides: Mapping[str, "TimedSide"]) -> None:
        self._synchronize = _synchronize_of(device_type)
        self.sides = sides
        self.rounds: list[dict[str, float]] = []

    def run(self, advance: Callable[[str], None] = lambda _: None) -> "Race":
        """Time all sides in each round, beginning with another one each time."""
        once = {name: max(self._time(side, 1), 1e-9) for name, side in self.sides.items()}
        once = {name: min(once[name], self._time(side, 1)) for name, side in self.sides.items()}  # first calls are slow
        calls = {name: max(1, round(_SECONDS / seconds)) for name, seconds in once.items()}
        names = list(self.sides)
        for turn in range(_ROUNDS if max(once.values()) < _SLOW else _SLOW_ROUNDS):
            first = turn % len(names)
            order = (*names[first:], *names[:first])
            self.rounds.append({name: self._time(self.sides[name], calls[name]) for name in order})
            advance("timing")
        return self

    def _time(self, side: "TimedSide", calls: int) -> float:
        with side.prepared() as call:
            self._synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self._synchronize()
            return (time.perf_counter() - start) / calls

    def seconds(self, side: str) -> float:
        """Return the median seconds of a call."""
        return median(each[side] for each in self.rounds)

    def ratio(self, side: str, to: str) -> float:
        """Return the median over the rounds of the ratio of two sides."""
        return median(each[side] / each[to] for each in self.rounds)


@dataclass(frozen=True)
class TimedSide:
    """A call of a model, in a region and under rules, or outside both."""

    model: nn.Module
    call: Callable[[], Any]
    region: autocast | None
    rules: Policy

    @contextmanager
    def prepared(self) -> Iterator[Callable[[], object]]:
        """Apply the rules for a block, and yield the function that is timed."""
        region, call = self.region, self.call

        def in_region() -> None:
            with region:  # type: ignore[union-attr]
                call()

        with apply_policy(self.model, self.rules):
            yield call if region is None else in_region


def rule_overhead(device_type: str, dtype: torch.dtype) -> float:
    """Return the seconds that a rule adds to a call of a module."""
    model, x, region = nn.Identity(), torch.zeros(()), autocast(device_type, dtype)
    sides = {
        name: TimedSide(model, lambda: [model(x) for _ in range(20)], region, rules)
        for name, rules in (("plain", Policy()), ("ruled", Policy(modules={"": "fp32"})))
    }
    race = Race(device_type, sides).run()
    return max(0.0, race.seconds("ruled") - race.seconds("plain")) / 20


class ModuleClock:
    """A watcher that times the calls of modules, each without the modules that it calls."""

    def __init__(self, device_type: str) -> None:
        self._synchronize = _synchronize_of(device_type)
        self.seconds: dict[nn.Module, float] = {}
        self._open: list[tuple[nn.Module, float]] = []
        self._inside = [0.0]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start timing a call."""
        self._synchronize()
        self._inside.append(0.0)
        self._open.append((module, time.perf_counter()))

    def leave(self, module: nn.Module, output: Any) -> None:
        """Add the time of the call."""
        self._synchronize()
        end = time.perf_counter()
        started, inside = None, 0.0
        while started is not module:
            started, start = self._open.pop()
            inside = self._inside.pop()
        self._inside[-1] += time.perf_counter() - start
        self.seconds[module] = self.seconds.get(module, 0.0) + end - start - inside
