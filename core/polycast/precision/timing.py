"""How long a model takes in one precision and in another: sides that take turns, and medians."""

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
"""About what a turn takes."""
_ROUNDS = 15
_ROUNDS_OF_THE_SLOW = 7
_SLOW = 0.2
"""Seconds of a call from which on fewer rounds have to do."""

Side = Callable[[], object]


@dataclass(frozen=True)
class Timings:
    """Seconds of a call of the model by what it was run in, medians of `rounds` rounds; and which was chosen."""

    seconds: Mapping[str, float]
    chosen: str
    rounds: int

    def lines(self) -> list[str]:
        """Return it for people."""
        return [
            "ms a call: " + ", ".join(f"{name} {each * 1e3:.3g}" for name, each in self.seconds.items()),
            f"chosen: {self.chosen}; medians of {self.rounds} rounds in which the sides take turns",
        ]


def median(values: Iterable[float]) -> float:
    """Return the value in the middle; statistics has it too, and takes as long to import as the rest of this room."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Race:
    """Times sides in turns, so that what disturbs the machine disturbs all of them."""

    def __init__(self, device_type: str, sides: Mapping[str, "TimedSide"]) -> None:
        device = torch.get_device_module(device_type)
        self._synchronize: Callable[[], object] = getattr(device, "synchronize", lambda: None)
        self.sides = sides
        self.rounds: list[dict[str, float]] = []

    def run(self, advance: Callable[[str], None] = lambda _: None) -> "Race":
        """Time all sides in each of several rounds; who is first changes."""
        once = {name: max(self._time(side, 1), 1e-9) for name, side in self.sides.items()}
        once = {name: min(once[name], self._time(side, 1)) for name, side in self.sides.items()}  # the first is slow
        calls = {name: max(1, round(_SECONDS / seconds)) for name, seconds in once.items()}
        names = list(self.sides)
        for turn in range(_ROUNDS if max(once.values()) < _SLOW else _ROUNDS_OF_THE_SLOW):
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
        """Return the median over the rounds of how long a side takes, as a part of another."""
        return median(each[side] / each[to] for each in self.rounds)


@dataclass(frozen=True)
class TimedSide:
    """A call of a model, in a region and under rules, or in neither."""

    model: nn.Module
    call: Callable[[], Any]
    region: autocast | None
    rules: Policy

    @contextmanager
    def prepared(self) -> Iterator[Side]:
        """Yield what is timed; what comes before and after a program's calls is done before and after."""
        region, call = self.region, self.call

        def in_region() -> None:
            with region:  # type: ignore[union-attr]
                call()

        with apply_policy(self.model, self.rules):
            yield call if region is None else in_region


class _Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def seconds_of_a_rule(device_type: str, dtype: torch.dtype) -> float:
    """Return what it takes to run a module under a rule, besides what the module does."""
    model, x, region = _Empty(), torch.zeros(()), autocast(device_type, dtype)
    rules = Policy(modules={"": "fp32"})
    sides = {
        name: TimedSide(model, lambda: [model(x) for _ in range(20)], region, rules)
        for name, rules in (("plain", Policy()), ("ruled", rules))
    }
    race = Race(device_type, sides).run()
    return max(0.0, race.seconds("ruled") - race.seconds("plain")) / 20


class ModuleClock:
    """A watcher that times the calls of modules, each without those of the modules that it calls."""

    def __init__(self, device_type: str) -> None:
        device = torch.get_device_module(device_type)
        self._synchronize: Callable[[], object] = getattr(device, "synchronize", lambda: None)
        self.seconds: dict[nn.Module, float] = {}
        self._open: list[tuple[nn.Module, float]] = []
        self._inside = [0.0]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin to time a call."""
        self._synchronize()
        self._inside.append(0.0)
        self._open.append((module, time.perf_counter()))

    def leave(self, module: nn.Module, output: Any) -> None:
        """Add what the call took."""
        self._synchronize()
        end = time.perf_counter()
        started, inside = None, 0.0
        while started is not module:
            started, start = self._open.pop()
            inside = self._inside.pop()
        self._inside[-1] += time.perf_counter() - start
        self.seconds[module] = self.seconds.get(module, 0.0) + end - start - inside
