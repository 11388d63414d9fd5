"""Run a model once for ``tune``; with a loss, also backward."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..policy.dtypes import dtype_name
from .calls import ModelCall, run_eagerly
from .gradients import ParameterGradients
from .numerics import Sums, relative_error
from .values import replaced, tensors_in

Loss = Callable[[Any], Any]


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
    """Return the output of a model in a region; with a loss, its outcome. Gradients of parameters stay as they are.

    Raises:
        TypeError, ValueError: the result of the loss has no gradients.
    """
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
    """Return the result of a loss.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it is not a scalar, or does not require gradients.
    """
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
