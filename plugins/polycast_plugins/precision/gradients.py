"""The gradients of a model's parameters, and of each call of a module in backward.

The gradient of an input is what the backward of a call adds to it: the call gets views of its inputs, whose
gradients other users of the inputs do not add to. A module that writes to its inputs gets them themselves.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from polycast.plugin import torch_name

from .calls import CallKey
from .isolation import Situation
from .values import replaced, tensors_in

_will_execute: Callable[[Any], bool] = torch_name(
    "torch._C._will_engine_execute_node",
    lambda node: True,
    "polycast.compare does not see the gradients of modules of which an input or output has none",
)
ModulesById = Mapping[int, torch.nn.Module]
LOSS = "(loss)"
"""Stands for the loss among the names of modules."""
Gradients = list[torch.Tensor | None]
_HOOKS = "_post_accumulate_grad_hooks"
"""The attribute of tensors with :meth:`torch.Tensor.register_post_accumulate_grad_hook`'s, in torch 2.11 to 2.15."""


def floating(value: object) -> list[torch.Tensor]:
    """Return the different tensors in a value that may require gradients, without parameters."""
    found = {
        id(tensor): tensor
        for _, tensor in tensors_in(value)
        if tensor.layout is torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
        and not isinstance(tensor, torch.nn.Parameter)
    }
    return list(found.values())


def differentiable(value: object) -> list[torch.Tensor]:
    """Return the different tensors in a value that require gradients, without parameters."""
    return [tensor for tensor in floating(value) if tensor.requires_grad]


class GradientCall:
    """A call of a module whose gradients are pending.

    Attributes:
        saved: what is needed to repeat it; None if it cannot be repeated.
        of_inputs, of_outputs: the gradients, once they are known.
        is_used_in_forward: whether the forward, or the loss, has differentiated it (``torch.autograd.grad``). Then its
            gradients have a part that no call of a module computes.
    """

    def __init__(
        self,
        key: CallKey,
        module: torch.nn.Module,
        is_backward: Callable[[], bool],
        done: Callable[["GradientCall"], None],
    ) -> None:
        self.key, self.module = key, module
        self.saved: SavedCall | None = None
        self.of_inputs: Gradients = []
        self.of_outputs: Gradients = []
        self.is_used_in_forward = False
        self._is_backward, self._done = is_backward, done
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._count = 0

    def watch_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Await the gradients of the inputs."""
        for tensor in tensors:
            self._watch(tensor, self.of_inputs)

    def watch_outputs(self, output: object) -> None:
        """Await the gradients of the tensors in the output; those that require none have None."""
        for tensor in floating(output):
            if tensor.requires_grad:
                self._watch(tensor, self.of_outputs)
            else:
                self.of_outputs.append(None)

    def _watch(self, tensor: torch.Tensor, gradients: Gradients) -> None:
        position, node = len(gradients), get_gradient_edge(tensor).node

        def received(gradient: torch.Tensor | None) -> None:
            if self._is_backward():
                gradients[position] = gradient
                self._receive(node)
            else:
                self.is_used_in_forward = True

        gradients.append(None)
        self._nodes.append(node)
        self._handles.append(tensor.register_hook(received))  # type: ignore[no-untyped-call]

    def _receive(self, node: Any) -> None:
        if not self._count:  # each node that runs calls the hooks of its tensors; torch does not count the first node
            self._count = sum(each is node or _will_execute(each) for each in self._nodes)
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
    """The arguments and the situation of a call, for repetitions.

    Under checkpoint the same tensors must be saved in the same order when it computes the call again. So each call is
    saved, even if nobody will repeat it.
    """

    def __init__(self, arguments: Any, modules: ModulesById, writes_arguments: bool, situation: Situation) -> None:
        self.situation, self.writes_arguments = situation, writes_arguments
        self._tensors: Sequence[torch.Tensor] = ()
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
            self._kept: Any = _Keep.apply(anchor, *kept)  # type: ignore[no-untyped-call]

    def load(self) -> bool:
        """Load the tensors, once; return False if they could not be copied, or were written to since."""
        if self._structure is None:
            return False
        try:
            self._tensors = self._kept.grad_fn.saved_tensors  # freed with the output in torch 2.11
        except RuntimeError:
            return False
        return True

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Return the arguments and keyword arguments, with leaves as tensors, and the leaves that require gradients."""
        leaves = [
            tensor.detach().requires_grad_(requires_grad)
            for tensor, requires_grad in zip(self._tensors, self._requires_grad, strict=True)
        ]
        given = leaves
        if self.writes_arguments:  # leaves cannot be written to
            with torch.enable_grad():
                given = [leaf.clone() for leaf in leaves]
        in_place_of = {id(slot): tensor for slot, tensor in zip(self._slots.values(), given, strict=True)}
        args, kwargs = replaced(self._structure, in_place_of, self._modules)
        return args, kwargs, [leaf for leaf in leaves if leaf.requires_grad]


def isolated_inputs(arguments: Any, modules: ModulesById) -> tuple[Any, list[torch.Tensor]]:
    """Return arguments with views in place of the tensors that require gradients, and the views.

    The arguments are returned as they are, with the tensors themselves, if they cannot be copied.
    """
    tensors = differentiable(arguments)
    views = {id(tensor): tensor.view_as(tensor) for tensor in tensors}
    try:
        return _with(arguments, lambda _, value: _viewed(value, views, modules)), list(views.values())
    except Exception:  # an argument that cannot be copied
        return arguments, tensors


def isolated_unwritten_inputs(arguments: Any, written: Collection[str]) -> tuple[Any, list[torch.Tensor]]:
    """Return arguments of a module that writes to some, with views in place of the tensors that it does not write to.

    Tensors in containers, which the module may write to, are left out.
    """
    views: dict[int, torch.Tensor] = {}

    def viewed(path: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not differentiable(value):
            return value
        if id(value) not in views:
            views[id(value)] = value if path in written else value.view_as(value)
        return views[id(value)]

    return _with(arguments, viewed), list(views.values())


def _with(arguments: Any, function: Callable[[str, Any], Any]) -> Any:
    """Return arguments and keyword arguments, each replaced by the result of a function of its path and value."""
    args, kwargs = arguments
    return (
        tuple([function(f"[0][{position}]", value) for position, value in enumerate(args)]),
        {name: function(f"[1].{name}", value) for name, value in kwargs.items()},
    )


def _viewed(value: Any, views: Mapping[int, torch.Tensor], modules: ModulesById) -> Any:
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


class ParameterGradients:
    """The ``.grad`` of all parameters of a model, and of a loss that is a module, that require gradients."""

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
        hooks = [each for parameter in self.parameters if (each := getattr(parameter, _HOOKS, None))]
        suspended = [dict(each) for each in hooks]
        try:
            for each in hooks:  # setting the attribute to None would not remove them from the parameter
                each.clear()
            self.put(self.none())
            yield
        finally:
            self.put(before)
            for each, kept in zip(hooks, suspended, strict=True):
                each.update(kept)
