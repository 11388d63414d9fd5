"""Repeat a call of a module as in the tested run, with the modules inside of it as in the reference run."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from polycast.plugin import InstanceForward
from polycast_plugins.observe import RandomState

from .calls import CallKey, OpenCall, may_come_from_policy
from .gradients import GradientCall, Gradients, SavedCall, floating
from .isolation import Situation, outside_regions
from .sides import Side, Sides


class RepeatableCall(OpenCall):
    """A call in the reference's run, with what is needed to repeat it."""

    def __init__(
        self, key: CallKey, module: torch.nn.Module, arguments: Any, situation: Situation, pending: GradientCall | None
    ) -> None:
        super().__init__(key, module)
        self.arguments, self.situation, self.pending = arguments, situation, pending


class OwnGradients(NamedTuple):
    """The gradients of a repeated call.

    Attributes:
        of_inputs, of_parameters: those of the inputs and of the parameters, in the tested run's way.
        reference: those of the inputs in the reference's way; None if they are those of the reference's run.
    """

    of_inputs: Gradients
    of_parameters: Gradients
    reference: Gradients | None


class Repeater:
    """Repeats calls of the reference's run; `current` watches the call that is repeated now."""

    def __init__(self, sides: Sides, generators: RandomState) -> None:
        self._sides, self._generators = sides, generators
        self.current: _Repeated | None = None

    def forward(self, call: RepeatableCall, counterpart: torch.nn.Module) -> Any:
        """Return the output of the tested side's module on the arguments of a call.

        Returns None if the module of another model raises, because it takes arguments of other shapes, for instance.
        """
        args, kwargs = call.arguments
        with self._repeating(call.situation, in_backward=False), self._sides.tested.region, self._other_may_raise():
            return call.situation.context.run(counterpart, *args, **kwargs)
        return None

    def backward(
        self, saved: SavedCall, module: torch.nn.Module, counterpart: torch.nn.Module, of_outputs: Gradients
    ) -> OwnGradients | None:
        """Return the gradients of a call's inputs and of parameters, given those of its outputs.

        Returns None if they cannot be computed, because the arguments of the call are not known any more.
        """
        sides = self._sides
        if not saved.load():
            return None
        tested = None
        with self._other_may_raise(), self._repeating(saved.situation, in_backward=True) as repeated:
            tested = self._differentiated(saved, sides.tested, counterpart, of_outputs, repeated)
        if tested is None:
            return None
        reference = None
        if saved.writes_arguments:  # other users of an input may add to its gradient in the reference's run
            with self._repeating(saved.situation, in_backward=True, wholly=sides.reference) as repeated:
                reference = self._differentiated(saved, sides.reference, module, of_outputs, repeated)
        return OwnGradients(*tested, None if reference is None else reference[0])

    @contextmanager
    def _other_may_raise(self) -> Iterator[None]:
        """End a block at an exception of the module of another model, which gets the arguments of the reference's."""
        try:
            yield
        except Exception as error:
            if self._sides.have_one_model or not may_come_from_policy(error):
                raise

    def _differentiated(
        self, saved: SavedCall, side: Side, module: torch.nn.Module, of_outputs: Gradients, repeated: "_Repeated"
    ) -> tuple[Gradients, Gradients] | None:
        args, kwargs, leaves = saved.arguments()
        with side.gradients.set_aside():
            with torch.enable_grad(), side.region:
                output = saved.situation.context.run(module, *args, **kwargs)
            outputs = floating(output)
            pairs = [*zip(outputs, of_outputs, strict=False)]
            if len(outputs) != len(of_outputs) or any(
                gradient is not None and gradient.shape != each.shape for each, gradient in pairs
            ):
                return None
            known = [
                (each, gradient.to(each.dtype))
                for each, gradient in pairs
                if gradient is not None and each.requires_grad
            ]
            for each, gradient in known:  # which includes what the module itself adds to it after computing it
                each.register_hook(lambda _, gradient=gradient: gradient)  # type: ignore[no-untyped-call]
            repeated.begin_backward(module)
            if known:
                torch.autograd.backward([each for each, _ in known], [gradient for _, gradient in known])
            return [leaf.grad for leaf in leaves], side.gradients.current()

    @contextmanager
    def _repeating(
        self, situation: Situation, *, in_backward: bool, wholly: Side | None = None
    ) -> "Iterator[_Repeated]":
        """Prepare a repetition in the tested run's way, with the modules in the call as in the reference.

        All modules run in the way of the side `wholly`, if it is given.
        """
        sides, random = self._sides, self._generators.get()
        is_own_state = sides.have_one_model or wholly is sides.reference
        state = situation.state if is_own_state else sides.tested.state
        before = state.current()
        state.put(situation.cloned() if is_own_state else state.cloned())
        self._generators.set(situation.random)
        repeated = self.current = _Repeated(sides, in_backward, is_whole=wholly is not None)
        try:
            with ExitStack() as stack:
                if sides.reference.is_enabled or in_backward:
                    stack.enter_context(outside_regions())
                # Hooks for saved tensors, such as those of torch.utils.checkpoint, must not see this call.
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
                stack.enter_context(sides.activated(wholly or sides.tested))
                stack.enter_context(_without_warning_of_checkpoint())
                stack.callback(repeated.end)
                yield repeated
        finally:
            self.current = None
            state.put(before)
            self._generators.set(random)


def _itself(value: Any) -> Any:
    return value


@contextmanager
def _without_warning_of_checkpoint() -> Iterator[None]:
    """Ignore the warning of torch.utils.checkpoint for a part without gradients: parts run as in the reference."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        yield


class _Repeated:
    """Watches a repeated call: the modules that it calls run as in the reference, or all in the way of one side."""

    def __init__(self, sides: Sides, in_backward: bool, *, is_whole: bool) -> None:
        self._sides, self._in_backward, self._is_whole = sides, in_backward, is_whole
        self._open: list[tuple[torch.nn.Module, _Inner | None]] = []

    def begin_backward(self, module: torch.nn.Module) -> None:
        """Note that further calls, which torch.utils.checkpoint makes in backward, are inside the repeated one."""
        self._open.append((module, None))

    def end(self) -> None:
        """End the calls that raised."""
        for _module, inner in reversed(self._open):
            if inner is not None:
                inner.end()

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call."""
        if module not in self._sides.tested.names:
            return None
        if self._is_whole or len(self._open) != 1:
            self._open.append((module, None))
            return None
        inner = _Inner(self._sides, module, self._in_backward)
        self._open.append((module, inner))
        return inner.begin(args, kwargs)

    def leave(self, module: torch.nn.Module, output: Any) -> Any:
        """Handle the return of a call."""
        if module not in self._sides.tested.names:
            return None
        while True:
            last, inner = self._open.pop()
            if inner is not None:
                inner.give_back()
            if last is module:
                return output if inner is None else inner.output(output)


class _Inner:
    """A call inside of a repeated one, which runs as in the reference.

    If the reference is another model, its module is called, and its output replaces that of the tested one.
    """

    def __init__(self, sides: Sides, module: torch.nn.Module, in_backward: bool) -> None:
        self._sides, self._module, self._in_backward = sides, module, in_backward
        self._casts: InstanceForward.CastArguments | None = None
        self._stack = ExitStack()
        self._others: list[Any] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Switch to the reference, and return the arguments for it."""
        sides = self._sides
        if sides.reference.is_enabled:
            self._stack.enter_context(outside_regions())
        self._stack.enter_context(sides.activated(sides.reference))
        self._stack.enter_context(sides.reference.region)
        counterpart = sides.reference.by_name.get(sides.tested.names[self._module], self._module)
        if self._in_backward:
            self._stack.enter_context(_without_gradients(counterpart))
        casts = self._casts = _casts(sides, counterpart)
        if casts is not None:
            args = tuple([casts.of(value) for value in args])
            kwargs = {name: casts.of(value) for name, value in kwargs.items()}
        if counterpart is not self._module:
            self._others.append(counterpart(*args, **kwargs))
        return args, kwargs

    def output(self, output: Any) -> Any:
        """Return the output of the reference."""
        return self._others[0] if self._others else output

    def give_back(self) -> None:
        """Switch back to the tested side, and copy writes to casts to the arguments."""
        self._stack.close()
        if self._casts is not None:
            self._casts.give_back(self._module, "run in float32 by polycast.compare")

    def end(self) -> None:
        """Switch back after an exception."""
        self._stack.close()
        if self._casts is not None:
            self._casts.restore()


def _casts(sides: Sides, module: torch.nn.Module) -> InstanceForward.CastArguments | None:
    """Return what casts the arguments of a module of the reference; None if they need no cast."""
    device, tested, reference = sides.tested.region.device, sides.tested, sides.reference
    fast = tested.region.fast_dtype
    called = reference.profile.modules.get(module)
    if not tested.is_enabled or (called is not None and fast in called.dtypes):
        return None
    if not reference.is_enabled:
        return InstanceForward.CastArguments(device, torch.float32)
    other = reference.region.fast_dtype
    return None if other is fast else InstanceForward.CastArguments(device, other, of=fast)


@contextmanager
def _without_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Let the parameters of a module require no gradients for a block."""
    required: Sequence[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
    try:
        for parameter in required:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in required:
            parameter.requires_grad_(True)
