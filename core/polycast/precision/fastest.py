"""The fastest precision for each module, or op: what is proposed, and the race that decides."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..policy.value import Policy
from ..region.autocast import autocast
from .calls import Call
from .choice import Choice
from .failures import is_of_the_policy
from .hooks import here, watched
from .survey import Survey
from .timing import ModuleClock, Race, TimedSide, Timings, median, seconds_of_a_rule

FLOAT32 = "float32"
PLAIN = "the region without a policy"
_ROUNDS = 7
_ALIKE = 1.02
"""How much slower than the fastest a plainer way may be measured and still be chosen."""
_MOST_OPS = 12


class Stopwatch:
    """Times a model in a region, with some of it in other numbers and all of it.

    `fast` is a region without the recipe of `region`; None where that has none.
    """

    def __init__(
        self, model: torch.nn.Module, call: Call, region: autocast, seen: Survey, fast: autocast | None = None
    ) -> None:
        self._model, self._region, self._seen = model, region, seen
        self._kinds = (region, None) if fast is None else (region, fast, None)
        """What a module can be in, as the region that it is timed in: float32, outside all regions, is the last."""
        writes = seen.modules[model].writes_arguments
        self._call: Callable[[], Any] = (
            (lambda: call.of_model(model)) if writes else (lambda: model(*call.args, **call.kwargs))
        )

    def race(self, policies: Mapping[str, Policy], advance: Callable[[str], None] = lambda _: None) -> Race:
        """Time the model under each of some policies, and in float32 outside all regions."""
        sides = {FLOAT32: self._side(None)}
        for name, policy in policies.items():
            sides[name] = self._side(self._region, policy)
        return Race(self._region.device, sides).run(advance)

    def _side(self, region: autocast | None, policy: Policy | None = None) -> TimedSide:
        return TimedSide(self._model, self._call, region, Policy() if policy is None else policy)

    @staticmethod
    def _runs(side: TimedSide) -> bool:
        """Return whether the model runs there without an exception."""
        with side.prepared() as call:
            try:
                call()
            except Exception as error:
                if not is_of_the_policy(error):
                    raise
                return False
        return True

    def fastest_modules(self, needed: Choice) -> Choice:
        """Return what each module is to be in, by what each call was timed to take: not less than what is needed.

        A module in another precision than its caller costs a rule. So this is not each module's fastest one, but the
        cheapest choice for the tree of calls as a whole.
        """
        seconds = self._seconds_by_module()
        kinds = range(len(seconds))
        least = {**dict.fromkeys(needed.kept, 1), **dict.fromkeys(needed.members, kinds[-1])}
        rule = seconds_of_a_rule(self._region.device, self._region.fast_dtype)
        called = self._seen.by_name()
        inside: dict[str, list[str]] = {name: [] for name in called}
        root = next(iter(called))
        for name, each in called.items():
            if name != root:
                callers = (caller for caller in each.callers if caller is not None)
                inside[min(callers, key=lambda caller: called[caller].order)].append(name)
        # From the innermost on: what each costs in each precision, with the best for all that it calls.
        costs: dict[str, list[float]] = {}
        for name in reversed(called):
            costs[name] = [
                (seconds[kind][name] if kind >= least.get(name, 0) else float("inf"))
                + sum(min(self._costs(each, kind, costs, rule, called[each].calls)) for each in inside[name])
                for kind in kinds
            ]
        chosen: dict[str, int] = {}
        around = {root: 0}
        for name in called:
            options = self._costs(name, around[name], costs, rule, called[name].calls)
            chosen[name] = options.index(min(options))
            around.update(dict.fromkeys(inside[name], chosen[name]))
        members = tuple(name for name, kind in chosen.items() if kind == kinds[-1])
        return Choice(members, tuple(name for name, kind in chosen.items() if 0 < kind < kinds[-1]))

    @staticmethod
    def _costs(name: str, around: int, costs: Mapping[str, list[float]], rule: float, calls: int) -> list[float]:
        return [each + (calls * rule if kind != around else 0.0) for kind, each in enumerate(costs[name])]

    def _seconds_by_module(self) -> list[dict[str, float]]:
        """Return by kind the seconds that each module takes; inf where the model raises an exception."""
        modules = self._seen.modules
        taken: list[list[dict[str, float]]] = [[] for _ in self._kinds]
        kinds = [(kind, region) for kind, region in enumerate(self._kinds) if self._runs(self._side(region))]
        for turn in range(_ROUNDS + 1):
            for kind, region in kinds[:: 1 if turn % 2 else -1]:
                clock = ModuleClock(self._region.device)
                with watched(self._model, here(clock)), nullcontext() if region is None else region:
                    self._call()
                if turn:  # the first is slow
                    taken[kind].append({modules[module].name: each for module, each in clock.seconds.items()})
        return [
            {
                each.name: median(one.get(each.name, 0.0) for one in rounds) if rounds else math.inf
                for each in modules.values()
            }
            for rounds in taken
        ]

    def fastest_ops(
        self, tried: Mapping[str, Sequence[Choice]], policy_of: Callable[[Choice], Policy]
    ) -> dict[str, Choice]:
        """Return by op, of those that make the model faster by a choice, the one that makes it fastest.

        There is none where the model does not run in the region without a policy.
        """
        if not self._runs(self._side(self._region)):
            return {}
        sides = {
            f"{op} {number}": (op, choice)
            for op, choices in list(tried.items())[:_MOST_OPS]
            for number, choice in enumerate(choices)
            if self._runs(self._side(self._region, policy_of(choice)))
        }
        race = self.race({PLAIN: Policy(), **{side: policy_of(choice) for side, (_, choice) in sides.items()}})
        found: dict[str, Choice] = {}
        ratios = {side: race.ratio(side, PLAIN) for side in sides}
        for side in sorted(sides, key=ratios.__getitem__):
            op, choice = sides[side]
            if ratios[side] < 1 / _ALIKE:
                found.setdefault(op, choice)
        return found


def choose(race: Race, within: Sequence[str]) -> Timings:
    """Return what is chosen of the sides that keep the tolerance, the plainest first: the fastest, or a plainer one."""
    best = min(within, key=race.seconds)
    chosen = next(side for side in within if race.ratio(side, best) <= _ALIKE)
    return Timings({side: race.seconds(side) for side in race.sides}, chosen, len(race.rounds))
