"""Save and restore the gradients of a model's parameters while others are computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..torch_internals.private_names import without_post_accumulate_grad_hooks

LOSS = "(loss)"
"""Stands for the loss among the names of modules."""
Gradients = list[torch.Tensor | None]


class ParameterGradients:
    """The ``.grad`` of all parameters of a model, and of a loss that is a module, that require gradients.

    Attributes:
        names: the names of the parameters.
        parameters: the parameters.
    """

    def __init__(self, model: torch.nn.Module, loss: object = None) -> None:
        named = [*model.named_parameters()]
        if isinstance(loss, torch.nn.Module):
            named += [(f"{LOSS}.{name}", parameter) for name, parameter in loss.named_parameters()]
        found = {id(each): (name, each) for name, each in reversed(named) if each.requires_grad}
        self.names = [name for name, _ in reversed(found.values())]
        self.parameters = [parameter for _, parameter in reversed(found.values())]

    def current(self) -> Gradients:
        """Return the current gradients."""
        return [parameter.grad for parameter in self.parameters]

    def put(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set all gradients."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def none(self) -> Gradients:
        """Return no gradient for each parameter."""
        return [None] * len(self.parameters)

    def with_zeros(self) -> dict[str, torch.Tensor]:
        """Return the current gradients by name, zeros where there is none."""
        both = zip(self.names, self.parameters, strict=True)
        return {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in both}

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Run a block that begins without gradients, and restore them.

        Hooks that run after gradients are accumulated do not run in it: they may update parameters.
        """
        before = self.current()
        with without_post_accumulate_grad_hooks(self.parameters):
            self.put(self.none())
            try:
                yield
            finally:
                self.put(before)
