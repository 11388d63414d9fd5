"""Make the two runs of a comparison: calls of the reference's are repeated, and those of the tested one are matched.

The runs are in lockstep. When a call of the reference's run returns, or when all its gradients are known, the run
waits until the tested run has made the same call, or knows its gradients, too.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from polycast.plugin import events, torch_name

from .calls import CallKey, OpenCall, Watcher, innermost_common, watched_modules
from .gradients import GradientCall, SavedCall, isolated_inputs, isolated_unwritten_inputs
from .isolation import Situation, isolated
from .record import Lockstep, MatchedCall, Returned, ReturnedGradients
from .repeated import RepeatableCall, Repeater
from .sides import Side
from .values import copied

_are_functorch_transforms_active: Callable[[], bool] = torch_name(
    "torch._C._are_functorch_transforms_active", lambda: True, "polycast.compare compares no modules"
)
_saved_tensors_hooks: Callable[[bool], Any] = torch_name(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lambda ignore_is_tracing: None,
    "polycast.compare needs more memory for models with torch.utils.checkpoint",
)
_EARLY = 16
"""The number of calls whose gradients the tested run may know before the reference's run."""


@dataclass
class RunResult:
    """The output of a run and, with a loss, the gradients of the parameters by name."""

    output: Any
    gradients: dict[str, torch.Tensor | None]


class ModelRun:
    """What the two runs have in common: their open calls, and the calls whose gradients they await.

    Attributes:
        in_backward: whether the backward has begun. The calls in it are those of torch.utils.checkpoint.
    """

    def __init__(self, both: Lockstep, side: Side) -> None:
        self.in_backward = False
        self._both, self._side = both, side
        self._around = OpenCall((), None)
        self._pending: dict[int, GradientCall] = {}
        self._modules = {id(module): module for module in side.model.modules()}

    def run(self) -> RunResult:
        """Run the model, and with a loss its backward, and return the result."""
        side, call, loss = self._side, self._both.call, self._both.loss
        region = side.region if side.is_enabled else nullcontext()
        if loss is None:
            with region:
                return RunResult(call.run(side.model), {})
        # On the calling thread, because one thread for each device would have to serve both runs.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            with region:
                output = call.run(side.model)
                value = loss(output)
            self.in_backward = True
            self._around = OpenCall((("recomputed", 0),), None)
            value.backward()
        return RunResult(output, dict(zip(side.gradients.names, side.gradients.current(), strict=True)))

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
        return self._both.loss is not None and torch.is_grad_enabled()

    def _is_recomputed_in_place(self) -> bool:
        """Return whether torch.utils.checkpoint computes a call again whose gradients are pending already."""
        return self.in_backward and _saved_tensors_hooks(True) is not None

    def _pending_call(self, key: CallKey, module: torch.nn.Module, arguments: Any) -> tuple[Any, GradientCall]:
        """Return the arguments of a call, with which its gradients can be told from others, and the pending call."""
        if self._writes_arguments(module):
            arguments, tensors = isolated_unwritten_inputs(arguments, self._side.profile.modules[module].written)
        else:
            arguments, tensors = isolated_inputs(arguments, self._modules)
        call = GradientCall(key, module, lambda: self.in_backward, self._finish)
        if not self._is_recomputed_in_place():
            call.watch_inputs(tensors)
            self._pending[id(call)] = call
        return arguments, call

    def _await_outputs(self, call: GradientCall | None, output: Any) -> None:
        if call is not None and id(call) in self._pending:
            call.watch_outputs(output)

    def _finish(self, call: GradientCall) -> None:
        del self._pending[id(call)]
        self._handle_gradients(call)

    def _handle_gradients(self, call: GradientCall) -> None:
        raise NotImplementedError


class ReferenceRun(ModelRun):
    """Watches the reference's run, and repeats each call in the tested run's way."""

    def __init__(self, both: Lockstep, side: Side) -> None:
        super().__init__(both, side)
        self._open: list[RepeatableCall] = []
        self._repeater = Repeater(both.sides, both.generators)

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call."""
        if _are_functorch_transforms_active():  # the values of its tensors cannot be read
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
        if _are_functorch_transforms_active():
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
                self._both.note_unrepeatable(call.module)
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

    def _handle_gradients(self, call: GradientCall) -> None:
        both, counterpart = self._both, self._counterpart(call.module)
        own = None
        if call.saved is not None and counterpart is not None and _is_repeatable(call):
            own = self._repeater.backward(call.saved, call.module, counterpart, call.of_outputs)
        if own is None:
            both.note_unrepeatable(call.module)
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

    def __init__(self, both: Lockstep, side: Side) -> None:
        super().__init__(both, side)
        self._open: list[tuple[OpenCall, Any, GradientCall | None]] = []

    def in_worker(self) -> Callable[[], RunResult]:
        """Return a function that makes the run on a thread of its own, beginning with the current state."""
        both, side = self._both, self._side
        default_device, state, random = torch.get_default_device(), side.state.cloned(), both.generators.get()

        def make() -> RunResult:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if default_device.type != "cpu":  # it is thread-local
                    stack.enter_context(default_device)
                both.sides.activate(side)
                side.state.put(state)
                both.generators.set(random)
                events.recipe_call.add(both.record.recipe_counts.note, threading.get_ident())
                return self.run()

        return make

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call."""
        if module not in self._side.names or _are_functorch_transforms_active():
            return None
        key = (self._open[-1][0] if self._open else self._around).key_inside(self._side.names[module])
        given, pending = None, None
        if self._awaits():
            given, pending = self._pending_call(key, module, (args, kwargs))
        self._open.append((OpenCall(key, module), (args, kwargs), pending))
        return given

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        """Handle the return of a call."""
        if module not in self._side.names or _are_functorch_transforms_active():
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
            both.record.parted_in[around[-1][0] if around else ""] = None
            if around != call.key:
                return  # the reference's run makes this call later or never: it waits for the call around both
            both.hand_over(self._side)
        other = both.waiting
        if other is None:
            return
        theirs = other.arguments
        if self._writes_arguments(module):
            theirs = arguments = None
        both.record.outputs.add_matched(MatchedCall(call.key, theirs, arguments, other.output, other.own, output))
        both.generators.set(other.random)
        del theirs, other
        both.waiting = None
        both.hand_over(self._side)

    def _handle_gradients(self, call: GradientCall) -> None:
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


def run_both(both: Lockstep) -> tuple[RunResult, RunResult]:
    """Return the results of the reference and of the tested run; after both have ended, raise what one raised."""
    caller, sides, handoff = threading.get_ident(), both.sides, both.handoff
    reference, tested = ReferenceRun(both, sides.reference), TestedRun(both, sides.tested)

    def watcher() -> Watcher | None:
        if handoff.in_worker():
            handoff.check()
            return tested
        return reference if threading.get_ident() == caller else None

    with ExitStack() as stack:
        stack.enter_context(isolated(both.generators))
        stack.enter_context(sides.applied())
        if both.loss is not None:  # a call that checkpoint begins to compute again does not end in the middle
            stack.enter_context(set_checkpoint_early_stop(False))
        for side in (sides.reference, sides.tested):
            if side is sides.reference or not sides.have_one_model:
                stack.enter_context(side.state.on_clones())
                if both.loss is not None:
                    stack.enter_context(side.gradients.set_aside())
        stack.callback(events.recipe_call.remove, both.record.recipe_counts.note)
        stack.callback(tested.end)
        stack.callback(reference.end)
        theirs = tested.in_worker()
        modules = dict.fromkeys((*sides.reference.names, *sides.tested.names))
        stack.enter_context(watched_modules(modules, watcher))
        return handoff.run(reference.run, theirs)
