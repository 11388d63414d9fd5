"""The search of ``tune``."""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from polycast import autocast
from polycast.errors import warn_user
from polycast_plugins.fastest import OpSeconds, op_seconds
from polycast_plugins.observe import RandomState

from .calls import Calls, DispatchMode, in_this_thread, may_come_from_policy, tensors_of, text_of, watched
from .candidates import Blocks, ModuleCandidates, OpCandidates, candidates_in, chosen_ops, ops_seen
from .compare import compare_with_float32, progress
from .evidence import Evidence, Holdout, Tuned, machine
from .isolation import isolated
from .measured import Measured, TuneArguments
from .minimal_set import NO_POLICY, CandidateOrder, Choice, OutOfBudget, Trial, Trials, minimal_choice
from .profiling_run import profile_runs
from .timing import BY_PROFILE, PLAIN_REGION, ModelTimer, Timings, pick_fastest

_MARGIN = 0.97
"""Float32 has to take less than this part of the fast dtype's time."""


def modules_faster_in_float32(model: nn.Module, call: Callable[[], object], region: autocast) -> list[nn.Module] | None:
    """Run a model once in a region, and return the modules that are faster in float32; None without a profile.

    A module counts without the modules in it. Nothing is measured.
    """
    seconds_of = op_seconds(region.device, region.fast_dtype)
    if seconds_of is None:
        return None
    clock = _ProfileClock(seconds_of, region.fast_dtype)
    with watched(model, in_this_thread(clock)), region, clock:
        call()
    return [module for module, (fast, float32) in clock.seconds.items() if float32 < _MARGIN * fast]


class _ProfileClock(DispatchMode):  # type: ignore[misc]
    """A watcher that adds up the seconds that a profile has for the matmuls of each module, in two ways."""

    def __init__(self, seconds_of: OpSeconds, dtype: torch.dtype) -> None:
        super().__init__()
        self._seconds_of, self._dtype = seconds_of, dtype
        self._open: list[nn.Module] = []
        self.seconds: dict[nn.Module, tuple[float, float]] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(module)

    def leave(self, module: nn.Module, output: Any) -> None:
        while self._open.pop() is not module:
            pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._open and isinstance(result, torch.Tensor) and result.dtype is self._dtype:
            found = self._seconds_of(func, args, kwargs or {})
            if found is not None:
                fast, float32 = self.seconds.get(self._open[-1], (0.0, 0.0))
                self.seconds[self._open[-1]] = fast + found[0], float32 + found[1]
        return result


class _Found(NamedTuple):
    choice: Choice
    met: bool
    is_minimal: bool
    reason: str


class Tuner:
    """Searches a policy for a model."""

    def __init__(self, model: torch.nn.Module, calls: Calls, holdout: Calls, arguments: TuneArguments) -> None:
        """Profile the model and find the candidates."""
        self._model, self._calls, self._arguments = model, calls, arguments
        region = self._region = arguments.region
        self._fast = None if arguments.recipe is None else autocast(region.device, region.fast_dtype)
        self._random = RandomState(region.device, tensors_of(model, calls))
        has_loss = arguments.loss is not None
        self._profile, outputs = profile_runs(model, (*calls, *holdout), region.device, has_loss)
        self._measured = Measured(model, calls, arguments, self._profile.state, outputs[: len(calls)])
        self._holdout = (
            Measured(model, holdout, arguments, self._profile.state, outputs[len(calls) :]) if holdout else None
        )
        del outputs
        self._candidates: ModuleCandidates | OpCandidates
        if arguments.over == "modules":
            self._blocks = Blocks(model, self._profile, arguments.exclude, arguments.candidates)
            self._candidates = ModuleCandidates(self._blocks, region.fast_dtype, arguments.recipe)
            self.names, self._excluded = self._blocks.names, sorted(self._blocks.excluded)
        else:
            with isolated(self._random, self._profile.state):
                seen = ops_seen(model, calls[0], self._fast or region)
            self.names, excluded = chosen_ops(seen, arguments.exclude, arguments.candidates)
            self._candidates = OpCandidates(arguments.recipe, excluded)
            self._excluded = list(excluded)

    def run(self, budget: int) -> Tuned:
        """Search, and return the policy and its evidence."""
        with progress("tuning", None) as advance:

            def evaluate(choice: Choice) -> Trial:
                trial = self._measured.trial(choice, self._candidates.policy(choice))
                kept = f", {len(choice.in_fast_dtype)} kept" if self._arguments.recipe is not None else ""
                advance(f"{len(choice.members)} in float32{kept}: {trial.distance:.3g}")
                return trial

            trials = Trials(evaluate, budget)
            order = CandidateOrder(self._propose(trials), self._candidates.can_leave_recipe)
            found = self._minimal(order, trials)
            timings = None
            if self._arguments.objective == "time" and found.met:
                found, timings = self._fastest(order, trials, found, advance)
        return self._tuned(order, found, trials, timings, budget)

    def _propose(self, trials: Trials) -> list[str]:
        """Return the candidates, beginning with the largest addition to the error, on the batch with the largest."""
        if self._arguments.over == "ops" or len(self.names) == 1:
            return self.names
        distances = trials.of(NO_POLICY).distances or (0.0,)
        call = self._calls[max(range(len(distances)), key=distances.__getitem__)]
        try:
            modules = compare_with_float32(self._model, call, self._region, self._profile).modules
        except Exception as error:
            if not may_come_from_policy(error):
                raise
            return self.names  # the model cannot run in the region without a policy
        order = candidates_in([module.name for module in modules], self._blocks.candidate_of)
        return list(dict.fromkeys([*order, *self.names]))

    def _minimal(self, order: CandidateOrder, trials: Trials) -> _Found:
        tolerance, aim = self._arguments.tolerance, self._arguments.aim
        everything = Choice(order.names)
        trials.of(NO_POLICY)
        trials.of(everything)
        found, reason = minimal_choice(order, lambda choice: trials.of(choice).distance <= aim), ""
        if found is None and aim < tolerance:
            found = minimal_choice(order, lambda choice: trials.of(choice).distance <= tolerance)
            reason = "no policy keeps the margin"
        if found is None:
            best = trials.closest()
            return _Found(best.choice, False, False, self._why_not_met(trials.of(everything)))
        if not found.is_minimal:
            budget = f"the budget was spent after {len(trials.made)} evaluations"
            reason = f"{reason}; {budget}" if reason else budget
        return _Found(found.choice, True, found.is_minimal, reason)

    def _why_not_met(self, everything: Trial) -> str:
        if everything.error:  # raised here too if it does not come from a policy
            self._measured.run_reference()
        if math.isinf(self._measured.distance_of_references()):
            return "no policy keeps the tolerance: the metric of float32's own output and itself is not finite"
        what = self._arguments.over if self._arguments.candidates is None else "candidates"
        with_all = f"no policy keeps the tolerance: with all {what} in float32"
        if everything.error:
            return f"{with_all} the model raises: {everything.error}"
        return f"{with_all} the distance is {everything.distance:.3g}"

    def _fastest(
        self, order: CandidateOrder, trials: Trials, found: _Found, advance: Callable[[str], None]
    ) -> tuple[_Found, Timings]:
        """Return the fastest of the proposed choices that keep the tolerance, and the timings."""
        has_recipe, over = self._arguments.recipe is not None, self._arguments.over
        with isolated(self._random, self._profile.state):
            timer = ModelTimer(self._model, self._calls, self._region, self._profile, self._fast)
            proposed = {PLAIN_REGION: NO_POLICY}
            by_profile = None if has_recipe or over == "ops" else self._by_profile()
            if by_profile is not None:
                proposed[BY_PROFILE] = order.choice((*found.choice.members, *by_profile), found.choice.in_fast_dtype)
            proposed["all in float32"] = Choice(order.names)
            if has_recipe:
                proposed["all in the fast dtype"] = order.all_fast()
            proposed["the minimal set out of the recipe" if has_recipe else "the minimal set in float32"] = found.choice
            if over == "modules":
                fastest = timer.fastest_modules(self._blocks.in_order_of_calls(), found.choice)
            else:
                fastest = timer.fastest_ops(self._tried_ops(order), found.choice, self._candidates.policy)
            proposed[f"the fastest precision of each of the {over}"] = order.choice(
                fastest.members, fastest.in_fast_dtype
            )
            sides: dict[str, Choice] = {}
            for side, choice in proposed.items():
                if choice not in sides.values() and self._meets_tolerance(trials, choice):
                    sides[side] = choice
            policies = {side: self._candidates.policy(choice) for side, choice in sides.items()}
            timings = pick_fastest(timer.race(policies, advance), list(sides), len(self._calls))
        return _Found(sides[timings.chosen], True, False, found.reason), timings

    def _by_profile(self) -> list[str] | None:
        """Return the candidates that a profile of the device says are faster in float32; None without a profile."""
        call = self._calls[0]
        try:
            modules = modules_faster_in_float32(self._model, lambda: call.run(self._model), self._region)
        except Exception as error:
            if not may_come_from_policy(error):
                raise
            return None  # the model cannot run in the region without a policy
        if modules is None:
            return None
        return candidates_in([self._profile.modules[module].name for module in modules], self._blocks.candidate_of)

    def _tried_ops(self, order: CandidateOrder) -> dict[str, list[Choice]]:
        """Return by op the choices with this op alone."""
        can_leave = self._candidates.can_leave_recipe
        return {op: [*([Choice(in_fast_dtype=(op,))] if can_leave(op) else []), Choice((op,))] for op in order.names}

    def _meets_tolerance(self, trials: Trials, choice: Choice) -> bool:
        try:
            return trials.of(choice).distance <= self._arguments.aim
        except OutOfBudget:
            return False

    def _held_out(self, choice: Choice) -> Holdout | None:
        """Return what is measured on the batches that the search has not seen."""
        if self._holdout is None:
            return None
        plain = self._holdout.trial(NO_POLICY, self._candidates.policy(NO_POLICY))
        trial = plain if choice == NO_POLICY else self._holdout.trial(choice, self._candidates.policy(choice))
        met = trial.distance <= self._arguments.tolerance
        each = trial.distances or (trial.distance,)
        return Holdout(text_of(self._holdout.calls), trial.distance, plain.distance, each, met, trial.error)

    def _tuned(
        self, order: CandidateOrder, found: _Found, trials: Trials, timings: Timings | None, budget: int
    ) -> Tuned:
        arguments = self._arguments
        all_fast = None if arguments.recipe is None else trials.made.get(order.all_fast())
        evidence = Evidence(
            model=type(self._model).__qualname__,
            device_type=self._region.device,
            dtype=self._region.fast_dtype,
            inputs=text_of(self._calls),
            over=arguments.over,
            objective=arguments.objective,
            metric=arguments.metric_name,
            tolerance=arguments.tolerance,
            budget=budget,
            members=found.choice.members,
            candidates=len(self.names),
            distance=trials.of(found.choice).distance,
            plain=trials.of(NO_POLICY).distance,
            met=found.met,
            is_minimal=found.is_minimal,
            reason=found.reason,
            trials=tuple(trials.made.values()),
            timings=timings,
            machine=MappingProxyType(machine(self._region.device)),
            recipe=arguments.recipe,
            kept=found.choice.in_fast_dtype,
            fast=None if all_fast is None else all_fast.distance,
            batches=len(self._calls),
            reduction=arguments.reduction,
            margin=arguments.margin,
            excluded=tuple(self._excluded),
            holdout=self._held_out(found.choice),
        )
        if not found.met:
            warn_user(f"{found.reason}. The closest that was found has the distance {evidence.distance:.3g}.")
        elif evidence.holdout is not None and not evidence.holdout.met:
            warn_user(
                f"the policy keeps the tolerance on the data, but not on the batches held out: their distance is "
                f"{evidence.holdout.distance:.3g}. Search over data like theirs, or aim lower, with margin=."
            )
        return Tuned(self._candidates.policy(found.choice, evidence.name()), evidence)
