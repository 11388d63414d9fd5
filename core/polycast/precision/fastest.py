"""Find the fastest precision of each module or op, and time the model as a whole."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..policy.value import Policy
from ..region.autocast import autocast
from .calls import Call
from .failures import may_come_from_policy
from .hooks import in_this_thread, watched
from .minimal_set import Choice, Members
from .profiling_run import Profile
from .timing import ModuleClock, Race, TimedSide, Timings, median, rule_overhead

FLOAT32 = "float32"
PLAIN_REGION = "the region without a policy"
BY_PROFILE = "float32 where the profile says that it is faster"
_ROUNDS = 7
_TIE = 1.02
"""A simpler way that takes at most this many times as long as the fastest is chosen instead."""
_MAX_OPS = 12


class Stopwatch:
    """Times a model in a region under policies, and its modules in each precision.

    `fast` is the region without its recipe, or None if it has none.
    """

    def __init__(
        self, model: torch.nn.Module, call: Call, region: autocast, profile: Profile, fast: autocast | None = None
    ) -> None:
        self._model, self._region, self._profile = model, region, profile
        self._precisions = (region, None) if fast is None else (region, fast, None)
        """The regions to time modules in; the last, None, is float32 outside all regions."""
        writes = profile.modules[model].writes_arguments
        self._call: Callable[[], Any] = (
            (lambda: call.of_model(model)) if writes else (lambda: model(*call.args, **call.kwargs))
        )

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

    def fastest_modules(self, needed: Choice) -> Choice:
        """Return the fastest choice by the times of the modules, with at least the precision that is needed.

        A module in another precision than its caller costs the overhead of a rule. So the result is not the fastest
        precision of each module, but the fastest choice for the tree of calls as a whole.
        """
        seconds = self._seconds_by_module()
        precisions = range(len(seconds))
        lowest = {**dict.fromkeys(needed.kept, 1), **dict.fromkeys(needed.members, precisions[-1])}
        rule = rule_overhead(self._region.device, self._region.fast_dtype)
        called = self._profile.by_name()
        inside: dict[str, list[str]] = {name: [] for name in called}
        root = next(iter(called))
        for name, each in called.items():
            if name != root:
                callers = (caller for caller in each.callers if caller is not None)
                inside[min(callers, key=lambda caller: called[caller].order)].append(name)
        # From the innermost modules outwards: the cost of each precision, with the best for all modules that it calls.
        costs: dict[str, list[float]] = {}
        for name in reversed(called):
            costs[name] = [
                (seconds[precision][name] if precision >= lowest.get(name, 0) else math.inf)
                + sum(min(self._costs(each, precision, costs, rule, called[each].calls)) for each in inside[name])
                for precision in precisions
            ]
        chosen: dict[str, int] = {}
        around = {root: 0}
        for name in called:
            options = self._costs(name, around[name], costs, rule, called[name].calls)
            chosen[name] = options.index(min(options))
            around.update(dict.fromkeys(inside[name], chosen[name]))
        members = tuple(name for name, precision in chosen.items() if precision == precisions[-1])
        return Choice(members, tuple(name for name, precision in chosen.items() if 0 < precision < precisions[-1]))

    @staticmethod
    def _costs(name: str, around: int, costs: Mapping[str, list[float]], rule: float, calls: int) -> list[float]:
        return [cost + (calls * rule if precision != around else 0.0) for precision, cost in enumerate(costs[name])]

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
        kept = (*needed.kept, *(op for op, choice in best.items() if choice.kept))
        return Choice(members, tuple(op for op in kept if op not in members))


def pick_fastest(race: Race, within: Sequence[str]) -> Timings:
    """Return the timings with the fastest side, of those given from the simplest on, or a simpler one in a tie."""
    best = min(within, key=race.seconds)
    chosen = next(side for side in within if race.ratio(side, best) <= _TIE)
    return Timings({side: race.seconds(side) for side in race.sides}, chosen, len(race.rounds))
