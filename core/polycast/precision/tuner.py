"""The search of ``tune``."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..errors import warn_user
from ..policy.recipe import Recipe
from ..region.autocast import autocast
from ..region.module_rules import apply_policy
from .by_profile import modules_faster_in_float32
from .calls import Call
from .candidates import Modules, Ops, ops_seen
from .compare import compared
from .evidence import Evidence, Tuned, machine
from .failures import may_come_from_policy, short_text
from .fastest import BY_PROFILE, PLAIN_REGION, Stopwatch, pick_fastest
from .hooks import uncompiled
from .isolation import RandomState, isolated
from .minimal_set import NO_POLICY, CandidateOrder, Choice, OutOfBudget, minimal_choice
from .numerics import Sums, has_floats, relative_error
from .profiling_run import profile_run
from .progress import progress
from .state_file import StateFile
from .timing import Timings
from .trials import Trial, Trials, distance_of

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class TuneArguments:
    """The arguments of ``tune``, apart from the model and its inputs.

    Attributes:
        metric: the metric; None for the relative L2 error.
        metric_name: its name, with a digest of its code.
        region: the region, with the recipe if there is one.
        tolerance, over, objective, recipe: as given.
    """

    metric: Metric | None
    metric_name: str
    region: autocast
    tolerance: float
    over: str
    objective: str
    recipe: Recipe | None


class _Found(NamedTuple):
    choice: Choice
    met: bool
    is_minimal: bool
    reason: str


class Tuner:
    """Searches a policy for a model."""

    def __init__(self, model: torch.nn.Module, call: Call, arguments: TuneArguments) -> None:
        """Profile the model and find the candidates.

        Raises:
            ValueError: there is no metric, and nothing to compare in the output.
        """
        self._model, self._call, self._arguments = model, call, arguments
        region = arguments.region
        self._region, self._metric = region, arguments.metric or relative_error
        self._fast = None if arguments.recipe is None else autocast(region.device, region.fast_dtype)
        self._generators = RandomState(region.device)
        self._profile, self._reference = profile_run(model, call, region.device)
        self._check_reference()
        self._candidates: Modules | Ops
        if arguments.over == "modules":
            self._candidates = Modules(self._profile, region.fast_dtype, arguments.recipe)
            self.names = list(self._profile.by_name())
        else:
            self._candidates = Ops(arguments.recipe)
            with self._without_side_effects():
                self.names = ops_seen(model, call, self._fast or region)

    def _check_reference(self) -> None:
        has_metric = self._arguments.metric is not None
        if not has_metric and not has_floats(self._reference):
            raise ValueError(
                f"the model returned no floating-point tensor, but {type(self._reference).__name__}, which the default "
                "metric cannot compare. Pass one: metric(output, reference)."
            )
        sums = Sums.of(self._reference, self._reference)
        if sums.has_no_finite and not has_metric:
            raise ValueError(sums.nonfinite_warning("the output of a region cannot be compared with it"))
        if sums.inf or sums.nan:
            ignores = "the default metric ignores elements that are the same inf or nan in the region"
            warn_user(sums.nonfinite_warning("metric must handle them" if has_metric else ignores))

    @contextmanager
    def _without_side_effects(self) -> Iterator[None]:
        """Run a block that calls the model: outside the caller's regions, without gradients or side effects."""
        with isolated(), self._generators.preserved(), self._profile.state.on_clones():
            yield

    def run(self, budget: int, file: StateFile | None) -> Tuned:
        """Search, and return the policy and its evidence."""
        with progress("tuning", None) as advance:

            def evaluate(choice: Choice) -> Trial:
                trial = self._evaluate(choice)
                if file is not None:
                    file.note_evaluation()
                kept = f", {len(choice.kept)} kept" if self._arguments.recipe is not None else ""
                advance(f"{len(choice.members)} in float32{kept}: {trial.distance:.3g}")
                return trial

            def evaluate_and_save(choice: Choice) -> Trial:
                trial = evaluate(choice)
                if file is not None:
                    file.add(trial)
                return trial

            if file is not None:
                file.check_names(self.names, self._arguments.over)
                file.check_again(NO_POLICY, evaluate)
            order = CandidateOrder(self._order(file), self._candidates.can_leave_recipe)
            trials = Trials(evaluate_and_save, budget, None if file is None else file.trials)
            found = self._minimal(order, trials)
            timings = None
            if self._arguments.objective == "time" and found.met:
                found, timings = self._fastest(order, trials, found, advance)
        return self._tuned(order, found, trials, timings, budget)

    def _order(self, file: StateFile | None) -> list[str]:
        if file is not None and file.order is not None:
            return file.order
        order = self._propose()
        if file is not None:
            file.set_order(order)
        return order

    def _propose(self) -> list[str]:
        """Return the candidates, beginning with the largest addition to the error."""
        if self._arguments.over == "ops":
            return self.names
        try:
            return [module.name for module in compared(self._model, self._call, self._region, self._profile).modules]
        except Exception as error:
            if not may_come_from_policy(error):
                raise
            return self.names  # the model cannot run in the region without a policy

    def _evaluate(self, choice: Choice) -> Trial:
        with self._without_side_effects():
            with uncompiled(), apply_policy(self._model, self._candidates.policy(choice)):
                try:
                    with self._region:
                        output = self._call.of_model(self._model)
                except Exception as error:
                    if not may_come_from_policy(error):
                        raise
                    return Trial(choice.members, math.inf, short_text(error), choice.kept)
            distance = distance_of(self._metric(output, self._reference))
            return Trial(choice.members, distance, kept=choice.kept)

    def _minimal(self, order: CandidateOrder, trials: Trials) -> _Found:
        everything = Choice(order.names)
        trials.of(NO_POLICY)
        trials.of(everything)
        found = minimal_choice(order, lambda choice: trials.of(choice).distance <= self._arguments.tolerance)
        if found is None:
            best = min(trials.made.values(), key=lambda trial: (trial.distance, len(trial.members), len(trial.kept)))
            return _Found(best.choice, False, False, self._why_not_met(trials.of(everything)))
        reason = "" if found.is_minimal else f"the budget was spent after {len(trials.made)} evaluations"
        return _Found(found.choice, True, found.is_minimal, reason)

    def _why_not_met(self, everything: Trial) -> str:
        with self._without_side_effects():
            if everything.error:  # raised here too if it does not come from a policy
                with uncompiled():
                    self._call.of_model(self._model)
            itself = distance_of(self._metric(self._reference, self._reference))
        if math.isinf(itself):
            return "no policy keeps the tolerance: the metric of float32's own output and itself is not finite"
        with_all = f"no policy keeps the tolerance: with all {self._arguments.over} in float32"
        if everything.error:
            return f"{with_all} the model raises: {everything.error}"
        return f"{with_all} the distance is {everything.distance:.3g}"

    def _fastest(
        self, order: CandidateOrder, trials: Trials, found: _Found, advance: Callable[[str], None]
    ) -> tuple[_Found, Timings]:
        """Return the fastest of the proposed choices that keep the tolerance, and the timings."""
        has_recipe, over = self._arguments.recipe is not None, self._arguments.over
        with self._without_side_effects():
            watch = Stopwatch(self._model, self._call, self._region, self._profile, self._fast)
            proposed = {PLAIN_REGION: NO_POLICY}
            by_profile = None if has_recipe or over == "ops" else self._by_profile()
            if by_profile is not None:
                proposed[BY_PROFILE] = order.choice((*found.choice.members, *by_profile), found.choice.kept)
            proposed["all in float32"] = Choice(order.names)
            if has_recipe:
                proposed["all in the fast dtype"] = order.all_fast()
            proposed["the minimal set out of the recipe" if has_recipe else "the minimal set in float32"] = found.choice
            if over == "modules":
                fastest = watch.fastest_modules(found.choice)
            else:
                fastest = watch.fastest_ops(self._tried_ops(order), found.choice, self._candidates.policy)
            proposed[f"the fastest precision of each of the {over}"] = order.choice(fastest.members, fastest.kept)
            sides: dict[str, Choice] = {}
            for side, choice in proposed.items():
                if choice not in sides.values() and self._keeps_tolerance(trials, choice):
                    sides[side] = choice
            policies = {side: self._candidates.policy(choice) for side, choice in sides.items()}
            timings = pick_fastest(watch.race(policies, advance), list(sides))
        return _Found(sides[timings.chosen], True, False, found.reason), timings

    def _by_profile(self) -> list[str] | None:
        """Return the modules that a profile of the device says are faster in float32; None without a profile."""
        try:
            modules = modules_faster_in_float32(self._model, lambda: self._call.of_model(self._model), self._region)
        except Exception as error:
            if not may_come_from_policy(error):
                raise
            return None  # the model cannot run in the region without a policy
        return None if modules is None else [self._profile.modules[module].name for module in modules]

    def _tried_ops(self, order: CandidateOrder) -> dict[str, list[Choice]]:
        """Return by op the choices with this op alone."""
        can_leave = self._candidates.can_leave_recipe
        return {op: [*([Choice(kept=(op,))] if can_leave(op) else []), Choice((op,))] for op in order.names}

    def _keeps_tolerance(self, trials: Trials, choice: Choice) -> bool:
        try:
            return trials.of(choice).distance <= self._arguments.tolerance
        except OutOfBudget:
            return False

    def _tuned(
        self, order: CandidateOrder, found: _Found, trials: Trials, timings: Timings | None, budget: int
    ) -> Tuned:
        arguments = self._arguments
        all_fast = None if arguments.recipe is None else trials.made.get(order.all_fast())
        evidence = Evidence(
            model=type(self._model).__qualname__,
            device_type=self._region.device,
            dtype=self._region.fast_dtype,
            inputs=str(self._call),
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
            kept=found.choice.kept,
            fast=None if all_fast is None else all_fast.distance,
        )
        if not found.met:
            warn_user(f"{found.reason}. The closest that was found has the distance {evidence.distance:.3g}.")
        return Tuned(self._candidates.policy(found.choice, evidence.name()), evidence)
