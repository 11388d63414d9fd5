"""Measure the distance of a model under a policy from float32, over the batches of a search."""

import math
from typing import Any

import torch

from ..common.random_state import RandomState
from ..errors import warn_user
from ..policy.value import Policy
from ..region.module_rules import apply_policy
from .calls import Calls, ModelCall, may_come_from_policy, short_text, tensors_of
from .isolation import ModelState, isolated
from .minimal_set import Choice, Trial, distance_of
from .numerics import Sums, has_floats
from .outcome import run_once, sums_of
from .tune_arguments import TuneArguments


class Measured:
    """The batches, with float32's results.

    Without a loss, float32's outputs are kept. With one, the outcome of a single batch is kept; those of several, which
    have the gradients of all parameters, are computed for each trial.

    Attributes:
        calls: a call of the model for each batch.
    """

    def __init__(
        self, model: torch.nn.Module, calls: Calls, arguments: TuneArguments, state: ModelState, outputs: list[Any]
    ) -> None:
        """Compute float32's results.

        Raises:
            ValueError: there is no metric, and nothing to compare in the output.
        """
        self.calls = calls
        self._model, self._arguments, self._state = model, arguments, state
        self._random = RandomState(arguments.region.device, tensors_of(model, calls))
        self._references: list[Any] | None = None
        if arguments.loss is None:
            self._references = outputs
        elif len(calls) == 1:
            self._references = [self._run(calls[0])]
        self._check_references(has_metric=arguments.metric is not None)

    def _check_references(self, *, has_metric: bool) -> None:
        sums = Sums()
        for number in range(len(self.calls)):
            reference = self._reference(number)
            if not has_metric and self._arguments.loss is None and not has_floats(reference):
                raise ValueError(
                    f"the model returned no floating-point tensor, but {type(reference).__name__}, which the default "
                    "metric cannot compare. Pass one: metric(output, reference)."
                )
            each = sums_of(reference)
            if each.has_no_finite and not has_metric:
                raise ValueError(each.nonfinite_warning("the output of a region cannot be compared with it"))
            sums.add(each)
        if sums.inf or sums.nan:
            ignores = "the default metric ignores elements that are the same inf or nan in the region"
            warn_user(sums.nonfinite_warning("metric must handle them" if has_metric else ignores))

    def _run(self, call: ModelCall, region: Any = None) -> Any:
        with isolated(self._random, self._state):
            return run_once(self._model, call, self._arguments.loss, region)

    def _reference(self, number: int) -> Any:
        return self._run(self.calls[number]) if self._references is None else self._references[number]

    def trial(self, choice: Choice, policy: Policy) -> Trial:
        """Evaluate a choice on all batches, under its policy."""
        distances: list[float] = []
        error = ""
        for number, call in enumerate(self.calls):
            try:
                with apply_policy(self._model, policy):
                    output = self._run(call, self._arguments.region)
            except Exception as raised:
                if not may_come_from_policy(raised):
                    raise
                distances.append(math.inf)
                error = error or short_text(raised)
            else:
                distances.append(self._distance(output, self._reference(number)))
        each = tuple(distances) if len(distances) > 1 else ()
        return Trial(choice.members, self._arguments.reduced(distances), error, choice.in_fast_dtype, each)

    def _distance(self, output: Any, reference: Any) -> float:
        with isolated(self._random, self._state):
            return distance_of(self._arguments.distance(output, reference))

    def run_reference(self) -> None:
        """Run the model in float32, and raise what it raises."""
        self._run(self.calls[0])

    def distance_of_references(self) -> float:
        """Return the distance of float32's results from themselves."""
        each = [self._distance(reference, reference) for reference in map(self._reference, range(len(self.calls)))]
        return self._arguments.reduced(each)
