"""The gradients of a module's call: those of its inputs and outputs, and what is needed to repeat it in backward.

The gradient of an input is what the backward of this call adds to it: the call gets views of its inputs, whose
gradients other users of the inputs do not add to. A module that writes to its inputs gets them themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..torch_internals.names import are_functorch_transforms_active, will_execute
from .hooks import CallKey
from .isolation import Situation
from .values import replaced, tensors_in

Gradients = list[torch.Tensor | None]
Modules = Mapping[int, torch.nn.Module]


def differentiable(value: object) -> list[torch.Tensor]:
    """Return the different tensors in a value that require gradients, without parameters."""
    found = {
        id(tensor): tensor
        for _, tensor in tensors_in(value)
        if tensor.requires_grad and tensor.layout is torch.strided and not isinstance(tensor, torch.nn.Parameter)
    }
    return list(found.values())


def records_gradients() -> bool:
    """Return whether autograd records calls in a way that hooks can see."""
    return torch.is_grad_enabled() and not are_functorch_transforms_active()


class GradientCall:
    """A call of a module whose gradients are awaited.

    Attributes:
        key, module: the call.
        saved: what is needed to repeat it; None if it cannot be repeated.
        of_inputs, of_outputs: the gradients, once they are known.
    """

    def __init__(self, key: CallKey, module: torch.nn.Module, done: Callable[["GradientCall"], None]) -> None:
        self.key, self.module = key, module
        self.saved: SavedCall | None = None
        self.of_inputs: Gradients = []
        self.of_outputs: Gradients = []
        self._done = done
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._count = 0

    def watch_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Await the gradients of the inputs."""
        self._watch(tensors, self.of_inputs)

    def watch_outputs(self, output: object) -> None:
        """Await the gradients of the tensors in the output that require some."""
        self._watch(differentiable(output), self.of_outputs)

    def _watch(self, tensors: Sequence[torch.Tensor], gradients: Gradients) -> None:
        for position, tensor in enumerate(tensors):
            node = get_gradient_edge(tensor).node

            def received(gradient: torch.Tensor | None, position: int = position, node: Any = node) -> None:
                gradients[position] = gradient
                self._receive(node)

            gradients.append(None)
            self._nodes.append(node)
            self._handles.append(tensor.register_hook(received))  # type: ignore[no-untyped-call]

    def _receive(self, node: Any) -> None:
        if not self._count:  # each node that runs calls the hooks of its tensors; torch does not count the first node
            self._count = sum(each is node or will_execute(each) for each in self._nodes)
        self._count -= 1
        if not self._count:
            self._done(self)
            self.end()

    def end(self) -> None:
        """Await nothing more, and free everything."""
        for handle in self._handles:
            handle.remove()
        self._nodes, self._handles, self.saved = [], [], None
        self.of_inputs, self.of_outputs = [], []


class _Slot:
    """Stands for a tensor in the arguments of a saved call."""


class _Keep(torch.autograd.Function):
    """Saves tensors as autograd saves them: under torch.utils.checkpoint they are not kept, but computed again."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on it")


class SavedCall:
    """The arguments and the situation of a call, for one repetition.

    Under checkpoint the same tensors must be saved in the same order when it computes the call again. So each call is
    saved, even if nobody will repeat it.
    """

    def __init__(self, arguments: Any, modules: Modules, writes_arguments: bool, situation: Situation) -> None:
        self.situation, self._writes_arguments = situation, writes_arguments
        tensors = {
            id(tensor): tensor
            for _, tensor in tensors_in(arguments)
            if not isinstance(tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        }
        self._requires_grad = [tensor.requires_grad for tensor in tensors.values()]
        self._slots = {each: _Slot() for each in tensors}
        self._structure: Any = None
        try:
            self._structure = replaced(arguments, self._slots, modules)
        except Exception:  # an argument that cannot be copied
            self._slots = {}
        self._modules = modules
        kept = [tensor.detach() for tensor in tensors.values()]
        if writes_arguments:
            kept = [tensor.clone() for tensor in kept]
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            self._token: Any = _Keep.apply(anchor, *kept).grad_fn  # type: ignore[no-untyped-call]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]] | None:
        """Return the arguments and keyword arguments, with leaves as tensors, and the leaves that require gradients.

        Returns None if the arguments could not be copied, or were written to since.
        """
        if self._structure is None:
            return None
        try:
            tensors = self._token.saved_tensors
        except RuntimeError:
            return None
        leaves = [
            tensor.detach().requires_grad_(requires_grad)
            for tensor, requires_grad in zip(tensors, self._requires_grad, strict=True)
        ]
        given = leaves
        if self._writes_arguments:  # leaves cannot be written to
            with torch.enable_grad():
                given = [leaf.clone() for leaf in leaves]
        in_place_of = {id(slot): tensor for slot, tensor in zip(self._slots.values(), given, strict=True)}
        args, kwargs = replaced(self._structure, in_place_of, self._modules)
        return args, kwargs, [leaf for leaf in leaves if leaf.requires_grad]


def isolated_inputs(
    arguments: Any, tensors: Sequence[torch.Tensor], modules: Modules
) -> tuple[Any, list[torch.Tensor]]:
    """Return arguments with views of some tensors in their place, and the views.

    The arguments are returned as they are, with the tensors themselves, if they cannot be copied.
    """
    views = {id(tensor): tensor.view_as(tensor) for tensor in tensors}
    try:
        args, kwargs = arguments
        viewed = (
            tuple([_viewed(value, views, modules) for value in args]),
            {name: _viewed(value, views, modules) for name, value in kwargs.items()},
        )
    except Exception:  # an argument that cannot be copied
        return arguments, list(tensors)
    return viewed, list(views.values())


def _viewed(value: Any, views: Mapping[int, torch.Tensor], modules: Modules) -> Any:
    """Return a value with views; itself, if it has none of the tensors."""
    if isinstance(value, torch.Tensor):
        return views.get(id(value), value)
    if not any(id(tensor) in views for _, tensor in tensors_in(value)):
        return value
    others = {id(tensor): tensor for _, tensor in tensors_in(value)}
    return replaced(value, {**others, **views}, modules)


def aligned(*gradients: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor]]:
    """Return lists of gradients without those that are None in all, with zeros for the others that are None."""
    rows = []
    for row in zip(*gradients, strict=True):
        one = next((each for each in row if each is not None), None)
        if one is not None:
            rows.append([torch.zeros_like(one) if each is None else each for each in row])
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in gradients]
