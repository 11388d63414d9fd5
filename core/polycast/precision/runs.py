"""Watch the two runs of a comparison: the reference's, whose calls are repeated, and the tested one, which is matched.

The runs are in lockstep. When a call of the reference's run returns, or when all its gradients are known, the run
waits until the tested run has made the same call, or knows its gradients, too.
"""

from collections.abc import MutableMapping
from typing import Any, Protocol

import torch

from ..common.random_state import RandomState
from ..torch_internals.private_names import are_functorch_transforms_active, has_saved_tensors_hooks
from .gradient_calls import (
    GradientCall,
    Gradients,
    SavedCall,
    aligned,
    isolated_inputs,
    isolated_unwritten_inputs,
)
from .hooks import CallKey, OpenCall, innermost_common
from .isolation import Situation
from .record import MatchedCall, Record
from .repeated import OwnGradients, RepeatableCall, Repeater
from .sides import Side, Sides
from .values import copied

_EARLY = 16
"""The number of calls whose gradients the tested run may know before the reference's run."""


class Returned:
    """A call of the reference's run that waits for the tested run: its output, or its gradients."""

    def __init__(self, key: CallKey, arguments: Any, output: Any, own: Any, random: list[torch.Tensor]) -> None:
        self.key, self.arguments, self.output, self.own, self.random = key, arguments, output, own, random


class ReturnedGradients(Returned):
    """A call of the reference's run whose gradients are known."""

    def __init__(self, call: GradientCall, own: OwnGradients | None, random: list[torch.Tensor]) -> None:
        super().__init__(call.key, call.of_outputs, call.of_inputs, own, random)


class Both(Protocol):
    """What the two runs share, and how they take turns; see ``lockstep.py``."""

    sides: Sides
    record: Record
    generators: RandomState
    has_loss: bool
    waiting: Returned | None
    early: MutableMapping[CallKey, tuple[Gradients, Gradients]]

    def hand_over(self, side: Side) -> None:
        """Let the other run continue, until it hands control back or ends."""

    def add_own_gradients(self, gradients: Gradients) -> None:
        """Add the gradients of the parameters in a repeated call."""

    def own_is_unknown(self, module: torch.nn.Module) -> None:
        """Note that a call of a module of the reference cannot be repeated."""

    def record_gradients(self, returned: ReturnedGradients, found: tuple[Gradients, Gradients]) -> None:
        """Record the gradients of a call that both runs know."""


class ModelRun:
    """What the two runs have in common: their open calls, and the calls whose gradients they await.

    Attributes:
        in_backward: whether the backward has begun. The calls in it are those of torch.utils.checkpoint.
    """

    def __init__(self, both: Both, side: Side) -> None:
        self.in_backward = False
        self._both, self._side = both, side
        self._around = OpenCall((), None)
        self._pending: dict[int, GradientCall] = {}
        self._modules = {id(module): module for module in side.model.modules()}

    def begin_backward(self) -> None:
        """Note that the backward begins."""
        self.in_backward = True
        self._around = OpenCall((("recomputed", 0),), None)

    def end(self) -> None:
        """Await no gradients any more."""
        for call in self._pending.values():
            call.end()
        self._pending = {}

    def _writes_arguments(self, module: torch.nn.Module) -> bool:
        called = self._side.profile.modules.get(module)
        return called is not None and called.writes_arguments

    def _awaits(self) -> bool:
        """Return whether gradients of the next call are to be seen."""
        return self._both.has_loss and torch.is_grad_enabled()

    def _is_recomputed_in_place(self) -> bool:
        """Return whether torch.utils.checkpoint computes a call again whose gradients are pending already."""
        return self.in_backward and has_saved_tensors_hooks()

    def _pending_call(self, key: CallKey, module: torch.nn.Module, arguments: Any) -> tuple[Any, GradientCall]:
        """Return the arguments of a call, with which its gradients can be told from others, and the pending call."""
        if self._writes_arguments(module):
            arguments, tensors = isolated_unwritten_inputs(arguments, self._side.profile.modules[module].written)
        else:
            arguments, tensors = isolated_inputs(arguments, self._modules)
        call = GradientCall(key, module, lambda: self.in_backward, self._known)
        if not self._is_recomputed_in_place():
            call.watch_inputs(tensors)
            self._pending[id(call)] = call
        return arguments, call

    def _await_outputs(self, call: GradientCall | None, output: Any) -> None:
        if call is not None and id(call) in self._pending:
            call.watch_outputs(output)

    def _known(self, call: GradientCall) -> None:
        del self._pending[id(call)]
        self._gradients_are_known(call)

    def _gradients_are_known(self, call: GradientCall) -> None:
        raise NotImplementedError


class ReferenceRun(ModelRun):
    """Watches the reference's run, and repeats each call in the tested run's way."""

    def __init__(self, both: Both, side: Side) -> None:
        super().__init__(both, side)
        self._open: list[RepeatableCall] = []
        self._repeater = Repeater(both.sides, both.generators)

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call."""
        if are_functorch_transforms_active():  # the values of its tensors cannot be read
            return None
        if self._repeater.current is not None:
            return self._repeater.current.enter(module, args, kwargs)
        if module not in self._side.names:
            return None
        both, arguments, given = self._both, (args, kwargs), None
        writes = self._writes_arguments(module)
        if writes:
            arguments = copied(arguments, self._side.model, keeps_gradients=False)
        key = (self._open[-1] if self._open else self._around).key_inside(self._side.names[module])
        pending = None
        if self._awaits():
            given, pending = self._pending_call(key, module, (args, kwargs))
            situation = Situation(both.generators, self._side.state.inside(module))
            pending.saved = SavedCall((args, kwargs), self._modules, writes, situation)
        situation = Situation(both.generators, self._side.state)
        self._open.append(RepeatableCall(key, module, arguments, situation, pending))
        return given

    def leave(self, module: torch.nn.Module, output: Any) -> Any:
        """Handle the return of a call."""
        if are_functorch_transforms_active():
            return None
        if self._repeater.current is not None:
            return self._repeater.current.leave(module, output)
        if module not in self._side.names:
            return None
        call = self._open.pop()
        while call.module is not module:  # it raised, and its caller handled the exception
            call = self._open.pop()
        self._await_outputs(call.pending, output)
        if self.in_backward:
            return None
        both, counterpart = self._both, self._counterpart(module)
        if counterpart is None:
            return None
        own = self._repeater.forward(call, counterpart)
        both.record.add_own(call.key[-1][0], output, own)
        self._wait(Returned(call.key, call.arguments, output, own, both.generators.get()))
        return None

    def end(self) -> None:
        """Await no gradients any more."""
        for call in self._pending.values():
            if call.is_used_in_forward:
                self._both.own_is_unknown(call.module)
        super().end()

    def _counterpart(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """Return the module of the tested side."""
        return self._both.sides.tested.by_name.get(self._side.names[module])

    def _wait(self, returned: Returned) -> None:
        both = self._both
        both.waiting = returned
        try:
            both.hand_over(self._side)
        finally:
            both.waiting = None

    def _gradients_are_known(self, call: GradientCall) -> None:
        both, counterpart = self._both, self._counterpart(call.module)
        own = None
        if call.saved is not None and counterpart is not None and _is_repeatable(call):
            own = self._repeater.backward(call.saved, call.module, counterpart, call.of_outputs)
        if own is None:
            both.own_is_unknown(call.module)
        else:
            both.add_own_gradients(own.of_parameters)
        both.record.gradients.expect(call.key)
        returned = ReturnedGradients(call, own, both.generators.get())
        early = both.early.pop(call.key, None)
        if early is not None:
            both.record_gradients(returned, early)
        else:
            self._wait(returned)


class TestedRun(ModelRun):
    """Watches the tested run, and matches its calls with the reference's."""

    def __init__(self, both: Both, side: Side) -> None:
        super().__init__(both, side)
        self._open: list[tuple[OpenCall, Any, GradientCall | None]] = []

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call."""
        if module not in self._side.names or are_functorch_transforms_active():
            return None
        key = (self._open[-1][0] if self._open else self._around).key_inside(self._side.names[module])
        given, pending = None, None
        if self._awaits():
            given, pending = self._pending_call(key, module, (args, kwargs))
        self._open.append((OpenCall(key, module), (args, kwargs), pending))
        return given

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        """Handle the return of a call."""
        if module not in self._side.names or are_functorch_transforms_active():
            return
        call, arguments, pending = self._open.pop()
        while call.module is not module:
            call, arguments, pending = self._open.pop()
        self._await_outputs(pending, output)
        if not self.in_backward:
            self._match(call, arguments, module, output)

    def _match(self, call: OpenCall, arguments: Any, module: torch.nn.Module, output: Any) -> None:
        both = self._both
        while both.waiting is not None and both.waiting.key != call.key:
            around = innermost_common(both.waiting.key, call.key)
            both.record.add_parted(around[-1][0] if around else "")
            if around != call.key:
                return  # the reference's run makes this call later or never: it waits for the call around both
            both.hand_over(self._side)
        other = both.waiting
        if other is None:
            return
        theirs = other.arguments
        if self._writes_arguments(module):
            theirs = arguments = None
        both.record.add_matched(MatchedCall(call.key, theirs, arguments, other.output, other.own, output))
        both.generators.set(other.random)
        del theirs, other
        both.waiting = None
        both.hand_over(self._side)

    def _gradients_are_known(self, call: GradientCall) -> None:
        both = self._both
        other = both.waiting
        if not isinstance(other, ReturnedGradients) or other.key != call.key:
            both.early[call.key] = call.of_outputs, call.of_inputs
            while len(both.early) > _EARLY:
                del both.early[next(iter(both.early))]
            return
        both.record_gradients(other, (call.of_outputs, call.of_inputs))
        del other
        both.waiting = None
        both.hand_over(self._side)


def _is_repeatable(call: GradientCall) -> bool:
    """Return whether a repetition of a call computes all of its gradients, and nothing twice.

    The hooks of a module before its backward change the gradients of its outputs, which are known after the change.
    """
    return not call.is_used_in_forward and not getattr(call.module, "_backward_pre_hooks", None)


def matched_gradients(returned: ReturnedGradients, found: tuple[Gradients, Gradients]) -> MatchedCall | None:
    """Return the gradients of both runs as those of a matched call; None if they cannot be matched.

    In backward the gradients of the outputs are the arguments, and those of the inputs the output. The own output is
    None if it is not known, or cannot be compared with these.
    """
    of_outputs, of_inputs = found
    if len(returned.output) != len(of_inputs) or len(returned.arguments) != len(of_outputs):
        return None
    before, after = aligned(returned.arguments, of_outputs)
    own = returned.own
    if own is None or own.reference is not None or len(own.of_inputs) != len(of_inputs):
        reference, tested = aligned(returned.output, of_inputs)
        return MatchedCall(returned.key, before, after, reference, None, tested)
    reference, repeated, tested = aligned(returned.output, own.of_inputs, of_inputs)
    return MatchedCall(returned.key, before, after, reference, repeated, tested)
