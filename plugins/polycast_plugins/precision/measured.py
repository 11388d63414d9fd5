"""Measure the distance of a model under a policy from float32: of its output, or with a loss of its gradients too."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from polycast import Policy, apply_policy, autocast
from polycast.errors import warn_user
from polycast.plugin import Recipe, dtype_name
from polycast_plugins.observe import RandomState

from .calls import Calls, ModelCall, may_come_from_policy, run_eagerly, short_text, tensors_of
from .gradients import ParameterGradients
from .isolation import ModelState, isolated
from .minimal_set import Choice, Trial, distance_of
from .values import Sums, has_floats, relative_error, replaced, tensors_in

Loss = Callable[[Any], Any]
Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a forward and a backward of a model, as metrics get it if ``tune`` has a loss.

    Attributes:
        output: the output of the model, without autograd history.
        loss: the loss, a scalar.
        gradients: by name, the gradients of the model's parameters; zeros where the loss does not depend on one.
    """

    output: Any
    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]


def run_once(
    model: torch.nn.Module, call: ModelCall, loss: Loss | None, region: AbstractContextManager[object] | None
) -> Any:
    """Return the output of a model in a region; with a loss, its outcome. Gradients of parameters stay as they are."""
    with run_eagerly():
        if loss is None:
            with region or nullcontext():
                return call.run(model)
        gradients = ParameterGradients(model, loss)
        with torch.enable_grad(), gradients.set_aside():
            with region or nullcontext():
                output = call.run(model)
                value = loss_value(loss(output))
            value.backward()  # type: ignore[no-untyped-call]
            found = gradients.with_zeros()
        return Outcome(detached(output, model), value.detach(), found)


class LossModule(torch.nn.Module):
    """A loss as a module, so that its calls are seen as those of modules are."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.function = loss

    def forward(self, output: Any) -> torch.Tensor:
        """Return the loss."""
        return loss_value(self.function(output))


def loss_value(value: object) -> torch.Tensor:
    """Return the result of a loss, if it is a scalar with gradients."""
    expected = "loss must return a scalar tensor that requires gradients"
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{expected}; got {type(value).__name__}. For example: loss=lambda output: output.mean()")
    if value.numel() != 1:
        raise ValueError(f"{expected}; got the shape {tuple(value.shape)}. Reduce it, by mean() or sum().")
    if value.is_complex():
        raise ValueError(f"{expected}; got {dtype_name(value.dtype)}. Return a real number, such as its abs().")
    if not value.requires_grad:
        raise ValueError(
            f"{expected}; its result does not. Check that parameters of the model or inputs require gradients, and "
            "that neither the forward nor the loss detaches the output or runs under torch.no_grad()."
        )
    return value


def check_loss(loss: object) -> None:
    """Raise TypeError if a loss cannot be called."""
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's output, or None; got {loss!r}")


def outcome_error(outcome: Outcome, reference: Outcome) -> float:
    """Return the larger relative L2 error of the output and of all gradients: the default metric with a loss."""
    gradients = relative_error(list(outcome.gradients.values()), list(reference.gradients.values()))
    return max(relative_error([outcome.output, outcome.loss], [reference.output, reference.loss]), gradients)


def sums_of(reference: object) -> Sums:
    """Return the sums of an output or an outcome, compared with itself."""
    if isinstance(reference, Outcome):
        reference = [reference.output, reference.loss, list(reference.gradients.values())]
    return Sums.of(reference, reference)


def detached(output: Any, model: torch.nn.Module) -> Any:
    """Return an output with detached tensors; itself, if it cannot be copied."""
    tensors = {id(tensor): tensor.detach() for _, tensor in tensors_in(output)}
    try:
        return replaced(output, tensors, {id(module): module for module in model.modules()})
    except Exception:  # of the output's own code
        return output


@dataclass(frozen=True)
class TuneArguments:
    """The arguments of ``tune``, apart from the model and its data; the metric is None for the relative L2 error."""

    metric: Metric | None
    metric_name: str
    region: autocast
    tolerance: float
    over: str
    objective: str
    recipe: Recipe | None
    loss: Loss | None = None
    reduction: str = "worst"
    margin: float = 0.0
    exclude: Mapping[str, Any] = field(default_factory=dict)
    candidates: tuple[str, ...] | None = None

    @property
    def aim(self) -> float:
        """The distance that the search aims at: the tolerance without the margin."""
        return self.tolerance * (1.0 - self.margin)

    def distance(self, output: Any, reference: Any) -> object:
        """Return the distance of an output or an outcome from float32's, as the metric returns it."""
        if self.metric is not None:
            return self.metric(output, reference)
        return relative_error(output, reference) if self.loss is None else outcome_error(output, reference)

    def reduced(self, distances: list[float]) -> float:
        """Return the distance over several batches."""
        return max(distances) if self.reduction == "worst" else math.fsum(distances) / len(distances)


class Measured:
    """The batches, as calls of the model, with float32's results.

    Without a loss, float32's outputs are kept. With one, the outcome of a single batch is kept; those of several, which
    have the gradients of all parameters, are computed for each trial.
    """

    def __init__(
        self, model: torch.nn.Module, calls: Calls, arguments: TuneArguments, state: ModelState, outputs: list[Any]
    ) -> None:
        """Compute float32's results."""
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
