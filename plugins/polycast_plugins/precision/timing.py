"""Find the fastest precision of each module or op, and time a model in several, in alternating rounds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polycast import Policy, apply_policy, autocast

from .calls import Calls, in_this_thread, may_come_from_policy, watched
from .candidates import Block
from .minimal_set import Choice, Members
from .profiling_run import ModelProfile

_SECONDS = 0.02
"""The approximate duration of a turn."""
_RACE_ROUNDS = 15
_SLOW_ROUNDS = 7
_SLOW = 0.2
"""Calls that take this many seconds or more are timed in fewer rounds."""
FLOAT32 = "float32"
PLAIN_REGION = "the region without a policy"
BY_PROFILE = "float32 where the profile says that it is faster"
_ROUNDS = 7
_TIE = 1.02
"""A simpler way that takes at most this many times as long as the fastest is chosen instead."""
_MAX_OPS = 12


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
        for turn in range(_RACE_ROUNDS if max(once.values()) < _SLOW else _SLOW_ROUNDS):
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


class ModelTimer:
    """Times a model in a region under policies, and its modules in each precision.

    `fast` is the region without its recipe, or None if it has none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        calls: Calls,
        region: autocast,
        profile: ModelProfile,
        fast: autocast | None = None,
    ) -> None:
        self._model, self._region, self._profile = model, region, profile
        self._precisions = (region, None) if fast is None else (region, fast, None)
        """The regions to time modules in; the last, None, is float32 outside all regions."""
        self._calls = calls
        self._writes = any(each.writes_arguments for each in profile.modules.values())

    def _call(self) -> None:
        """Call the model with each batch."""
        for call in self._calls:
            if self._writes:
                call.run(self._model)
            else:
                self._model(*call.args, **call.kwargs)

    def race(self, policies: Mapping[str, Policy], advance: Callable[[str], None] = lambda _: None) -> Race:
        """Time the model under each policy, and in float32 outside all regions."""
        sides = {FLOAT32: self._side(None)}
        for name, policy in policies.items():
            sides[name] = self._side(self._region, policy)
        return Race(self._region.device, sides).run(advance)

    def _side(self, region: autocast | None, policy: Policy | None = None) -> TimedSide:
        return TimedSide(self._model, self._call, region, Policy() if policy is None else policy)

    @staticmethod
    def _runs(side: TimedSide) -> bool:
        """Return whether the model runs without an exception."""
        with side.prepared() as call:
            try:
                call()
            except Exception as error:
                if not may_come_from_policy(error):
                    raise
                return False
        return True

    def fastest_modules(self, blocks: Sequence[Block], needed: Choice) -> Choice:
        """Return the fastest choice by the times of the modules, with at least the precision that is needed.

        A block in another precision than its caller costs the overhead of a rule. So the result is not the fastest
        precision of each, but the fastest choice for the tree of calls as a whole.
        """
        seconds = self._seconds_by_module()
        rule = rule_overhead(self._region.device, self._region.fast_dtype)
        inside: list[list[int]] = [[] for _ in blocks]
        for number, block in enumerate(blocks):
            if block.caller is not None and block.caller != number:
                inside[block.caller].append(number)
        # From the innermost blocks outwards: the cost of each precision, with the best for all blocks that it calls.
        costs: list[list[float]] = [[] for _ in blocks]
        for number, block in reversed([*enumerate(blocks)]):
            allowed = self._allowed(block, needed, len(seconds))
            costs[number] = [
                (sum(of[name] for name in block.modules) if precision in allowed else math.inf)
                + sum(min(self._costs(each, precision, costs, rule, blocks[each].calls)) for each in inside[number])
                for precision, of in enumerate(seconds)
            ]
        chosen: list[int] = []
        for number, block in enumerate(blocks):
            around = 0 if block.caller is None else chosen[block.caller]
            options = self._costs(number, around, costs, rule, block.calls)
            chosen.append(options.index(min(options)))
        precision_of = {each.name: chosen[number] for number, each in enumerate(blocks) if each.name is not None}
        last = len(seconds) - 1
        members = tuple(name for name, precision in precision_of.items() if precision == last)
        return Choice(members, tuple(name for name, precision in precision_of.items() if 0 < precision < last))

    @staticmethod
    def _allowed(block: Block, needed: Choice, precisions: int) -> range:
        """Return the precisions that a block may have: those from the lowest that it needs on."""
        if block.is_excluded:
            return range(precisions - 1, precisions)
        if block.name is None:
            return range(1)
        lowest = precisions - 1 if block.name in needed.members else int(block.name in needed.in_fast_dtype)
        return range(lowest, precisions)

    @staticmethod
    def _costs(number: int, around: int, costs: Sequence[Sequence[float]], rule: float, calls: int) -> list[float]:
        return [cost + (calls * rule if precision != around else 0.0) for precision, cost in enumerate(costs[number])]

    def _seconds_by_module(self) -> list[dict[str, float]]:
        """Return by precision the seconds of each module; inf if the model raises an exception."""
        modules = self._profile.modules
        taken: list[list[dict[str, float]]] = [[] for _ in self._precisions]
        running = [(index, region) for index, region in enumerate(self._precisions) if self._runs(self._side(region))]
        for turn in range(_ROUNDS + 1):
            for index, region in running[:: 1 if turn % 2 else -1]:
                clock = ModuleClock(self._region.device)
                with watched(self._model, in_this_thread(clock)), nullcontext() if region is None else region:
                    self._call()
                if turn:  # the first is slow
                    taken[index].append({modules[module].name: each for module, each in clock.seconds.items()})
        return [
            {
                each.name: median(one.get(each.name, 0.0) for one in rounds) if rounds else math.inf
                for each in modules.values()
            }
            for rounds in taken
        ]

    def fastest_ops(
        self, tried: Mapping[str, Sequence[Choice]], needed: Choice, policy_of: Callable[[Choice], Policy]
    ) -> Choice:
        """Return `needed` and, for each op, the choice that makes the model fastest, if one makes it faster.

        Returns `needed` if the model does not run in the region without a policy.
        """
        if not self._runs(self._side(self._region)):
            return needed
        sides = {
            f"{op} {number}": (op, choice)
            for op, choices in list(tried.items())[:_MAX_OPS]
            for number, choice in enumerate(choices)
            if self._runs(self._side(self._region, policy_of(choice)))
        }
        race = self.race({PLAIN_REGION: Policy(), **{side: policy_of(choice) for side, (_, choice) in sides.items()}})
        ratios = {side: race.ratio(side, PLAIN_REGION) for side in sides}
        best: dict[str, Choice] = {}
        for side in sorted(sides, key=ratios.__getitem__):
            op, choice = sides[side]
            if ratios[side] < 1 / _TIE:
                best.setdefault(op, choice)
        members: Members = (*needed.members, *(op for op, choice in best.items() if choice.members))
        kept = (*needed.in_fast_dtype, *(op for op, choice in best.items() if choice.in_fast_dtype))
        return Choice(members, tuple(op for op in kept if op not in members))


def pick_fastest(race: Race, within: Sequence[str], calls: int = 1) -> Timings:
    """Return the timings of a call with the fastest side, of those given from the simplest on, or a simpler in a tie.

    A side of the race makes several calls.
    """
    best = min(within, key=race.seconds)
    chosen = next(side for side in within if race.ratio(side, best) <= _TIE)
    return Timings({side: race.seconds(side) / calls for side in race.sides}, chosen, len(race.rounds))
