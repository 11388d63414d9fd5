"""``tune``: what must stay in float32, or out of a recipe, as a policy with the evidence for it."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from ..common.versions import versions
from ..errors import warn_user
from ..plugins.registry import get_backend
from ..policy.dtypes import dtype_name
from ..policy.recipe import Recipe, RecipeLike
from ..policy.registered import policies_for
from ..region.autocast import autocast
from ..region.module_rules import apply_policy
from . import fingerprint
from .calls import Call
from .candidates import Modules, Ops, ops_seen
from .choice import PLAIN, Choice
from .compare import compared, enabled_region, wanted_recipe
from .errors import NonFinite, has_floats, relative_error
from .evidence import Evidence, Tuned, machine
from .failures import is_of_the_policy, short_text
from .fastest import PLAIN as PLAIN_SIDE
from .fastest import Stopwatch, choose
from .hooks import uncompiled
from .least import Ordered, least
from .progress import progress
from .search import Members, OutOfBudget
from .survey import survey
from .timing import Timings
from .trials import StateFile, StatePath, Trial, Trials, distance_of
from .untouched import RandomState, isolated

_OVER = ("modules", "ops")
_OBJECTIVES = ("accuracy", "time")
_SHOWN = 3
"""How many of the things that `state` cannot tell are named."""
_LEAST_BUDGET = 2
"""The region without a policy, and everything in float32; with a recipe, everything in the fast dtype, too."""

Metric = Callable[[Any, Any], Any]


def tune(
    model: torch.nn.Module,
    inputs: Any,
    metric: Metric | None = None,
    *,
    tolerance: float,
    device_type: str,
    dtype: torch.dtype | None = None,
    over: Literal["modules", "ops"] = "modules",
    objective: Literal["accuracy", "time"] = "accuracy",
    budget: int | None = None,
    state: StatePath | None = None,
    recipe: RecipeLike | None = None,
) -> Tuned:
    """Find what of a model must stay in float32 for its output in a region to stay close to float32's.

    With the objective ``"accuracy"`` that is the smallest set of modules, or of ops: :func:`compare` proposes the
    order, group bisection disposes. What is returned has been evaluated, as a whole and with each member taken out. A
    module stands for the ops in it that are in no module inside it; so one in float32 may have modules in it that are
    not.

    With a recipe it is what must leave the recipe, for the fast dtype (the rule ``"none"``), and what must be in
    float32 (``"fp32"``), for which the fast dtype is not enough either. The rules say the recipe themselves, so that
    the policy is right in regions with it and without one.

    With the objective ``"time"`` each module, or op, has the fastest of the precisions (float32, the fast dtype, and
    the recipe if there is one), as measured on these inputs under ``no_grad``, within the tolerance. The model under
    the policy is then timed as a whole, in turns with float32 and with the region without a policy: what is returned is
    the fastest that keeps the tolerance, and the plainer one where two are alike. It holds for these shapes, this
    machine, and regions without a :class:`WeightCache`.

    The model is left as it was, as by :func:`compare`. Each evaluation has the same random numbers. A set under which
    the model raises an exception is infinitely far off; the evidence has the exception's text.

    Args:
        model: a module, on the device; what it computes outside all regions is the reference.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments for the model's forward.
        metric: ``metric(output, reference)``, the distance of an output of the model from float32's: a number, of which
            nan and inf count as infinite. None: the relative L2 error over all floating-point tensors in the output.
        tolerance: how large the distance may be.
        device_type, dtype: of the region, as in :class:`autocast`.
        over: what is chosen from, ``"modules"`` or ``"ops"``.
        objective: ``"accuracy"`` or ``"time"``.
        budget: how many evaluations there may be at most; at least 2, and 3 with a recipe. None: four for each
            candidate, and 16.
        state: a file to keep the evaluations in. A search that was interrupted goes on from it, and finds what it would
            have found; of another model, other inputs or arguments (but `budget`) it is refused. The values and the
            code of model, inputs and metric are compared, and what the region without a policy computes.
        recipe: of the region, as in :class:`autocast`.

    Returns:
        The policy and its evidence. It is to be used with :func:`apply_policy`, or for ops as ``policy=`` of regions
        (which then have the recipe too).

    Raises:
        TypeError: `model`, `inputs` or what `metric` returns is none of these.
        ValueError: another argument is not legal; `state` is of another search; or there is no `metric`, and no
            floating-point tensor in the output, or none with a finite element in float32.
        OSError: `state` cannot be read or written.
        RuntimeError: as :func:`compare`.

    Warns:
        UserWarning: no policy keeps the tolerance; what is returned is the closest that was found. Or there is inf or
            nan in float32's own output; or `state` cannot tell whether something is what it was.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> _ = model[1].weight.data.fill_(1e6)  # more than float16 can hold
        >>> tuned = polycast.tune(model, torch.ones(1, 4), tolerance=0.01, device_type="cpu", dtype=torch.float16)
        >>> tuned.policy.modules["1"], tuned.met
        ('fp32', True)
    """
    wanted = wanted_recipe(recipe)
    least_budget = _LEAST_BUDGET if wanted is None else _LEAST_BUDGET + 1
    _check(metric, tolerance, over, objective, budget, least_budget)
    call = Call.of(model, inputs)
    region = enabled_region(device_type, dtype, recipe=wanted)
    asked = Asked("relative L2 error" if metric is None else fingerprint.of_function(metric), objective)
    file = None
    if state is not None:
        file = _state_file(state, model, call, metric, region, wanted, float(tolerance), over, objective)
    search = _Search(model, call, metric or relative_error, region, over, float(tolerance), wanted)
    limit = max(least_budget, 4 * len(search.names) + 16) if budget is None else budget
    return search.run(limit, file, asked)


def _state_file(
    state: StatePath,
    model: torch.nn.Module,
    call: Call,
    metric: Metric | None,
    region: autocast,
    recipe: Recipe | None,
    tolerance: float,
    over: str,
    objective: str,
) -> StateFile:
    """Return the file of a search: whatever its result depends on is compared with what the file is of."""
    backend = get_backend(region.device)
    policies = ((name, policy.value) for name, policy in backend.policies.items())
    registered = sorted(policies_for(region.device).items())
    of = {
        "tolerance": tolerance,
        "device_type": region.device,
        "dtype": dtype_name(region.fast_dtype),
        "over": over,
        "objective": objective,
        "recipe": None if recipe is None else recipe.text,
        "default_dtype": dtype_name(torch.get_default_dtype()),
        "register_op": {name: policy.value for name, policy in registered},
        "backend": f"{type(backend).__module__}.{type(backend).__qualname__} {fingerprint.of_table(policies)}",
        **versions(),
        **machine(region.device),
    }
    digests = fingerprint.Fingerprint(model, call, metric)
    file = StateFile(state, of, digests)
    if digests.unknown:
        more = f", and {len(digests.unknown) - _SHOWN} more" if len(digests.unknown) > _SHOWN else ""
        warn_user(
            f"state={os.fspath(state)!r} does not know the contents of {'; '.join(digests.unknown[:_SHOWN])}{more}. A "
            "search in which they are others goes on from this file as if they were not: name another file then."
        )
    return file


class Asked(NamedTuple):
    """What the evidence says of the metric, and the objective."""

    metric: str
    objective: str


class _Found(NamedTuple):
    choice: Choice
    met: bool
    is_minimal: bool
    reason: str


def _check(metric: object, tolerance: object, over: str, objective: str, budget: object, least_budget: int) -> None:
    if metric is not None and not callable(metric):
        raise TypeError(f"metric must be a function of an output and a reference, or None; got {metric!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance must be a number that is not negative, got {tolerance!r}")
    for what, said, known in (("over", over, _OVER), ("objective", objective, _OBJECTIVES)):
        if said not in known:
            raise ValueError(f"{what} must be {' or '.join(map(repr, known))}, got {said!r}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < least_budget):
        ways = "the region without a policy, and everything in float32"
        if least_budget > _LEAST_BUDGET:
            ways += ", and in the fast dtype"
        raise ValueError(f"budget must be a number of evaluations, at least {least_budget} ({ways}); got {budget!r}")


class _Search:
    def __init__(
        self,
        model: torch.nn.Module,
        call: Call,
        metric: Metric,
        region: autocast,
        over: str,
        tolerance: float,
        recipe: Recipe | None,
    ) -> None:
        self._model, self._call, self._metric, self._region, self._over = model, call, metric, region, over
        self._tolerance, self._recipe = tolerance, recipe
        self._fast = None if recipe is None else autocast(region.device, region.fast_dtype)
        self._generators = RandomState(region.device)
        self._seen, self._reference = survey(model, call, region.device)
        if metric is relative_error and not has_floats(self._reference):
            raise ValueError(
                f"the model returned no floating-point tensor, but {type(self._reference).__name__}: its distance from "
                "float32's is for a metric to say. Give one: metric(output, reference)."
            )
        unsound = NonFinite.of(self._reference)
        if unsound.are_all and metric is relative_error:
            consequence = "there is nothing that the output of a region could be compared with"
            raise ValueError(unsound.warning(consequence))
        if unsound.inf or unsound.nan:
            leaves_out = "an output that has the same ones is no further off for it"
            is_given = "metric has to make a distance of them"
            warn_user(unsound.warning(leaves_out if metric is relative_error else is_given))
        self._candidates: Modules | Ops
        if over == "modules":
            self._candidates = Modules(self._seen, region.fast_dtype, recipe)
            self.names = list(self._seen.by_name())
        else:
            self._candidates = Ops(recipe)
            with self._as_it_was():
                self.names = ops_seen(model, call, self._fast or region)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Run a block that calls the model: outside the regions of the caller, without gradients, without a trace."""
        with isolated(), self._generators.kept(), self._seen.state.set_aside():
            yield

    def run(self, budget: int, file: StateFile | None, asked: Asked) -> Tuned:
        with progress("tuning", None) as advance:

            def evaluate(choice: Choice) -> Trial:
                trial = self._evaluate(choice)
                if file is not None:
                    file.note_evaluation()
                kept = f", {len(choice.kept)} kept" if self._recipe is not None else ""
                advance(f"{len(choice.members)} in float32{kept}: {trial.distance:.3g}")
                return trial

            if file is not None:
                file.check_names(self.names, self._over)
                file.check_again(PLAIN, evaluate)
            ordered = Ordered(self._order(file), self._candidates.can_be_kept)
            trials = Trials(evaluate, budget, file)
            found = self._least(ordered, trials)
            timings = None
            if asked.objective == "time" and found.met:
                found, timings = self._fastest(ordered, trials, found, advance)
        all_fast = None if self._recipe is None else trials.made.get(ordered.all_fast())
        return self._tuned(found, trials, timings, asked, budget, all_fast)

    def _order(self, file: StateFile | None) -> list[str]:
        if file is not None and file.order is not None:
            return file.order
        order = self._propose()
        if file is not None:
            file.set_order(order)
        return order

    def _propose(self) -> list[str]:
        if self._over == "ops":
            return self.names
        try:
            return [module.name for module in compared(self._model, self._call, self._region, self._seen).modules]
        except Exception as error:
            if not is_of_the_policy(error):
                raise
            return self.names  # the model cannot run in the region without a policy

    def _evaluate(self, choice: Choice) -> Trial:
        with self._as_it_was():
            with uncompiled(), apply_policy(self._model, self._candidates.policy(choice)):
                try:
                    with self._region:
                        output = self._call.of_model(self._model)
                except Exception as error:
                    if not is_of_the_policy(error):
                        raise
                    return Trial(choice.members, math.inf, short_text(error), choice.kept)
            distance = distance_of(self._metric(output, self._reference))
            return Trial(choice.members, distance, kept=choice.kept)

    def _least(self, ordered: Ordered, trials: Trials) -> _Found:
        everything = Choice(ordered.order)
        trials.of(PLAIN)
        trials.of(everything)
        found = least(ordered, lambda choice: trials.of(choice).distance <= self._tolerance)
        if found is None:
            best = min(trials.made.values(), key=lambda trial: (trial.distance, len(trial.members), len(trial.kept)))
            return _Found(best.choice, False, False, self._why_not(trials.of(everything)))
        reason = "" if found.is_minimal else f"the budget was spent after {len(trials.made)} evaluations"
        return _Found(found.choice, True, found.is_minimal, reason)

    def _why_not(self, everything: Trial) -> str:
        with self._as_it_was():
            if everything.error:  # a model that raises without a region, too, has no policy to blame
                with uncompiled():
                    self._call.of_model(self._model)
            itself = distance_of(self._metric(self._reference, self._reference))
        if math.isinf(itself):
            return "no policy keeps the tolerance: the metric of float32's own output and itself is not finite"
        if everything.error:
            return (
                f"no policy keeps the tolerance: with all {self._over} in float32 the model raises: {everything.error}"
            )
        off = f"{everything.distance:.3g} off"
        return f"no policy keeps the tolerance: with all {self._over} in float32 the output is {off}"

    def _fastest(
        self, ordered: Ordered, trials: Trials, found: _Found, advance: Callable[[str], None]
    ) -> tuple[_Found, Timings]:
        with self._as_it_was():
            watch = Stopwatch(self._model, self._call, self._region, self._seen, self._fast)
            proposed = {PLAIN_SIDE: PLAIN, "all in float32": Choice(ordered.order)}
            if self._recipe is not None:
                proposed["all in the fast dtype"] = ordered.all_fast()
            smallest = "the smallest set in float32" if self._recipe is None else "the least that leaves the recipe"
            proposed[smallest] = found.choice
            if self._over == "modules":
                fast = watch.fastest_modules(found.choice)
            else:
                fast = self._fastest_ops(ordered.order, watch, found.choice)
            proposed[f"the fastest of each of the {self._over}"] = ordered.choice(fast.members, fast.kept)
            sides: dict[str, Choice] = {}
            for side, choice in proposed.items():
                if choice not in sides.values() and self._keeps(trials, choice):
                    sides[side] = choice
            policies = {side: self._candidates.policy(choice) for side, choice in sides.items()}
            timings = choose(watch.race(policies, advance), list(sides))
        return _Found(sides[timings.chosen], True, False, found.reason), timings

    def _fastest_ops(self, ops: Members, watch: Stopwatch, needed: Choice) -> Choice:
        """Return what makes the model faster, of each op by itself, and what is needed."""
        tried = {op: [*([Choice(kept=(op,))] if self._candidates.can_be_kept(op) else []), Choice((op,))] for op in ops}
        fast = watch.fastest_ops(tried, self._candidates.policy)
        members = {*needed.members, *(op for op, choice in fast.items() if choice.members)}
        kept = {*needed.kept, *(op for op, choice in fast.items() if choice.kept)} - members
        return Choice(tuple(members), tuple(kept))

    def _keeps(self, trials: Trials, choice: Choice) -> bool:
        try:
            return trials.of(choice).distance <= self._tolerance
        except OutOfBudget:
            return False

    def _tuned(
        self,
        found: _Found,
        trials: Trials,
        timings: Timings | None,
        asked: Asked,
        budget: int,
        all_fast: Trial | None,
    ) -> Tuned:
        evidence = Evidence(
            model=type(self._model).__qualname__,
            device_type=self._region.device,
            dtype=self._region.fast_dtype,
            inputs=str(self._call),
            over=self._over,
            objective=asked.objective,
            metric=asked.metric,
            tolerance=self._tolerance,
            budget=budget,
            members=found.choice.members,
            candidates=len(self.names),
            distance=trials.of(found.choice).distance,
            plain=trials.of(PLAIN).distance,
            met=found.met,
            is_minimal=found.is_minimal,
            reason=found.reason,
            trials=tuple(trials.made.values()),
            timings=timings,
            machine=MappingProxyType(machine(self._region.device)),
            recipe=self._recipe,
            kept=found.choice.kept,
            fast=None if all_fast is None else all_fast.distance,
        )
        if not found.met:
            warn_user(f"{found.reason}. The closest that was found is {evidence.distance:.3g} off.")
        return Tuned(self._candidates.policy(found.choice, evidence.name()), evidence)
