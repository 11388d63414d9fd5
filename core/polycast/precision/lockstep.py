"""Run a model in two ways in lockstep: each run hands the other one module's output, or gradients, at a time."""

import threading
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..common.random_state import RandomState
from ..engine.low_bit.listeners import listeners as low_bit_listeners
from .calls import ModelCall
from .gradient_calls import Gradients, aligned
from .handoff import Handoff
from .hooks import CallKey, Watcher, watched_modules
from .isolation import Values, isolated
from .outcome import LossModule
from .record import Record
from .runs import ModelRun, ReferenceRun, Returned, ReturnedGradients, TestedRun, matched_gradients
from .sides import Side, Sides


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        output: the output of the model.
        gradients: by name, the gradients of the parameters; empty without a loss.
    """

    output: Any
    gradients: dict[str, torch.Tensor | None]


class Lockstep:
    """Two runs of a model, each with its own random numbers, written state of the model, and gradients.

    Attributes:
        waiting: a call of the reference's run that waits for the tested run.
        early: by key, the gradients that the tested run knew before the reference's run.
        own_gradients: by name, the sums of the gradients of the parameters in repeated calls.
        unknown_own: the names of the parameters that are used in calls that cannot be repeated.
    """

    def __init__(self, sides: Sides, call: ModelCall, record: Record, loss: LossModule | None = None) -> None:
        self.sides, self.record = sides, record
        self.generators = RandomState(sides.tested.region.device)
        self.waiting: Returned | None = None
        self.early: MutableMapping[CallKey, tuple[Gradients, Gradients]] = {}
        self.own_gradients: dict[str, torch.Tensor] = {}
        self.unknown_own: set[str] = set()
        self.has_loss = loss is not None
        self._call, self._loss = call, loss
        self._handoff = Handoff()

    def run(self) -> tuple[RunResult, RunResult]:
        """Return the results of the reference and of the tested run.

        Raises:
            BaseException: the exception of one of the runs, after both have ended.
        """
        caller, sides = threading.get_ident(), self.sides
        reference, tested = ReferenceRun(self, sides.reference), TestedRun(self, sides.tested)

        def watcher() -> Watcher | None:
            if self._handoff.in_worker():
                self._handoff.check()
                return tested
            return reference if threading.get_ident() == caller else None

        with ExitStack() as stack:
            stack.enter_context(isolated(sides.tested.region.device))
            stack.enter_context(sides.applied())
            if self.has_loss:  # a call that checkpoint begins to compute again does not end in the middle
                stack.enter_context(set_checkpoint_early_stop(False))
            for side in (sides.reference, sides.tested):
                if side is sides.reference or not sides.have_one_model:
                    stack.enter_context(side.state.on_clones())
                    if self.has_loss:
                        stack.enter_context(side.gradients.set_aside())
            stack.callback(low_bit_listeners.remove, self.record.low_bit.note)
            stack.callback(tested.end)
            stack.callback(reference.end)
            theirs = self._tested(tested, sides.tested.state.cloned(), self.generators.get())
            modules = dict.fromkeys((*sides.reference.names, *sides.tested.names))
            stack.enter_context(watched_modules(modules, watcher))
            return self._handoff.run(lambda: self._run(reference, sides.reference), theirs)

    def _tested(self, run: ModelRun, state: Values, random: list[torch.Tensor]) -> Callable[[], RunResult]:
        """Return a function that makes the tested run, on a thread of its own."""
        default_device, side = torch.get_default_device(), self.sides.tested

        def make() -> RunResult:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if default_device.type != "cpu":  # it is thread-local
                    stack.enter_context(default_device)
                self.sides.activate(side)
                side.state.put(state)
                self.generators.set(random)
                low_bit_listeners.add(self.record.low_bit.note, threading.get_ident())
                return self._run(run, side)

        return make

    def _run(self, run: ModelRun, side: Side) -> RunResult:
        region = side.region if side.is_enabled else nullcontext()
        if self._loss is None:
            with region:
                return RunResult(self._call.of_model(side.model), {})
        # On the calling thread, because one thread for each device would have to serve both runs.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            with region:
                output = self._call.of_model(side.model)
                value = self._loss(output)
            run.begin_backward()
            value.backward()
        return RunResult(output, dict(zip(side.gradients.names, side.gradients.current(), strict=True)))

    def hand_over(self, side: Side) -> None:
        """Let the other run continue, then restore this run's state of the model, generators and gradients."""
        state, random = side.state.current(), self.generators.get()
        gradients = side.gradients.current() if self.has_loss else []
        if gradients and self.sides.have_one_model:
            side.gradients.put(side.gradients.none())
        self._handoff.hand_over()
        self.sides.activate(side)
        side.state.put(state)
        if self.has_loss:
            side.gradients.put(gradients)
        self.generators.set(random)

    def add_own_gradients(self, gradients: Gradients) -> None:
        """Add the gradients of the parameters in a repeated call."""
        for name, gradient in zip(self.sides.tested.gradients.names, gradients, strict=True):
            if gradient is not None:
                known = self.own_gradients.get(name)
                self.own_gradients[name] = gradient if known is None else known.add_(gradient)

    def own_is_unknown(self, module: torch.nn.Module) -> None:
        """Note that a call of a module of the reference cannot be repeated."""
        used = {id(parameter) for parameter in module.parameters()}
        side = self.sides.reference
        self.unknown_own.update(
            name
            for name, parameter in zip(side.gradients.names, side.gradients.parameters, strict=True)
            if id(parameter) in used
        )

    def record_gradients(self, returned: ReturnedGradients, found: tuple[Gradients, Gradients]) -> None:
        """Record the gradients of a call that both runs know."""
        own, call = returned.own, matched_gradients(returned, found)
        if call is None:
            return
        if own is not None and own.reference is not None:
            self.record.gradients.add_own(call.key[-1][0], *aligned(own.reference, own.of_inputs))
        elif call.own is not None:
            self.record.gradients.add_own(call.key[-1][0], call.reference, call.own)
        self.record.gradients.add_matched(call)
