"""The fastest precision for each module, or op: what is proposed, and the race that decides."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch

from ..policy.value import Policy
from ..region.autocast import autocast
from .calls import Call
from .hooks import here, watched
from .search import Members
from .survey import Survey
from .timing import ModuleClock, Race, TimedSide, Timings, median, seconds_of_a_rule

FLOAT32 = "float32"
PLAIN = "the region without a policy"
_ROUNDS = 7
_ALIKE = 1.02
"""How much slower than the fastest a plainer way may be measured and still be chosen."""
_MOST_OPS = 12


class Stopwatch:
    """Times a model in a region, with some of it in float32 and all of it."""

    def __init__(self, model: torch.nn.Module, call: Call, region: autocast, seen: Survey) -> None:
        self._model, self._region, self._seen = model, region, seen
        writes = seen.modules[model].writes_arguments
        self._call: Callable[[], Any] = (
            (lambda: call.of_model(model)) if writes else (lambda: model(*call.args, **call.kwargs))
        )

    def race(self, policies: Mapping[str, Policy], advance: Callable[[str], None]) -> Race:
        """Time the model under each of some policies, and in float32 outside all regions."""
        sides = {FLOAT32: TimedSide(self._model, self._call, None, Policy())}
        for name, policy in policies.items():
            sides[name] = TimedSide(self._model, self._call, self._region, policy)
        return Race(self._region.device, sides).run(advance)

    def fastest_modules(self, forced: Set[str]) -> set[str]:
        """Return the modules that are to be in float32, `forced` among them, by what each call was timed to take.

        A module in another precision than its caller costs a rule. So this is not each module's faster one, but the
        cheapest choice for the tree of calls as a whole.
        """
        fast, float32 = self._seconds_by_module()
        rule = seconds_of_a_rule(self._region.device, self._region.fast_dtype)
        called = self._seen.by_name()
        inside: dict[str, list[str]] = {name: [] for name in called}
        root = next(iter(called))
        for name, each in called.items():
            if name != root:
                callers = (caller for caller in each.callers if caller is not None)
                inside[min(callers, key=lambda caller: called[caller].order)].append(name)
        # From the innermost on: what each costs in either precision, with the best for all that it calls.
        costs: dict[str, tuple[float, float]] = {}
        for name in reversed(called):
            own = (fast[name] if name not in forced else float("inf"), float32[name])
            costs[name] = tuple(  # type: ignore[assignment]
                own[kind] + sum(min(self._costs(each, kind, costs, rule, called[each].calls)) for each in inside[name])
                for kind in (0, 1)
            )
        chosen: set[str] = set()
        around = {root: 0}
        for name in called:
            options = self._costs(name, around[name], costs, rule, called[name].calls)
            kind = options.index(min(options))
            chosen |= {name} if kind else set()
            around.update(dict.fromkeys(inside[name], kind))
        return chosen

    @staticmethod
    def _costs(
        name: str, around: int, costs: Mapping[str, tuple[float, float]], rule: float, calls: int
    ) -> tuple[float, float]:
        plain, float32 = costs[name]
        return plain + (calls * rule if around == 1 else 0.0), float32 + (calls * rule if around == 0 else 0.0)

    def _seconds_by_module(self) -> tuple[dict[str, float], dict[str, float]]:
        modules = self._seen.modules
        taken: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for turn in range(_ROUNDS + 1):
            for kind in (0, 1) if turn % 2 else (1, 0):
                clock = ModuleClock(self._region.device)
                with watched(self._model, here(clock)), self._region if kind == 0 else nullcontext():
                    self._call()
                if turn:  # the first is slow
                    taken[kind].append({modules[module].name: each for module, each in clock.seconds.items()})
        fast, float32 = (
            {each.name: median(one.get(each.name, 0.0) for one in rounds) for each in modules.values()}
            for rounds in taken
        )
        return fast, float32

    def fastest_ops(self, ops: Sequence[str], policy_of: Callable[[Members], Policy]) -> set[str]:
        """Return the ops of some that make the model faster when they are in float32."""
        tried = {f"{op} in float32": policy_of((op,)) for op in ops[:_MOST_OPS]}
        race = self.race({PLAIN: Policy(), **tried}, lambda _: None)
        return {op for op, side in zip(ops, tried, strict=False) if race.ratio(side, PLAIN) < 1 / _ALIKE}


def choose(race: Race, within: Sequence[str]) -> Timings:
    """Return what is chosen of the sides that keep the tolerance, the plainest first: the fastest, or a plainer one."""
    best = min(within, key=race.seconds)
    chosen = next(side for side in within if race.ratio(side, best) <= _ALIKE)
    return Timings({side: race.seconds(side) for side in race.sides}, chosen, len(race.rounds))
