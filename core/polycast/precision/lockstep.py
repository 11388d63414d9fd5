"""What the two runs of a comparison share: each hands the other one module's output, or gradients, at a time."""

from typing import Any

import torch

from ..common.random_state import RandomState
from .calls import ModelCall, tensors_of
from .gradient_calls import GradientCall, aligned
from .hooks import CallKey
from .outcome import LossModule
from .parameter_gradients import Gradients
from .record import MatchedCall, Record
from .repeated import OwnGradients
from .sides import Handoff, Side, Sides


class Returned:
    """A call of the reference's run that waits for the tested run: its output, or its gradients."""

    def __init__(self, key: CallKey, arguments: Any, output: Any, own: Any, random: list[torch.Tensor]) -> None:
        self.key, self.arguments, self.output, self.own, self.random = key, arguments, output, own, random


class ReturnedGradients(Returned):
    """A call of the reference's run whose gradients are known."""

    def __init__(self, call: GradientCall, own: OwnGradients | None, random: list[torch.Tensor]) -> None:
        super().__init__(call.key, call.of_outputs, call.of_inputs, own, random)


class Lockstep:
    """Two runs of a model, each with its own random numbers, written state of the model, and gradients.

    Attributes:
        call, loss: what is run.
        waiting: a call of the reference's run that waits for the tested run.
        early: by key, the gradients that the tested run knew before the reference's run.
        own_gradients: by name, the sums of the gradients of the parameters in repeated calls.
        unknown_own: the names of the parameters that are used in calls that cannot be repeated.
    """

    def __init__(self, sides: Sides, call: ModelCall, record: Record, loss: LossModule | None = None) -> None:
        self.sides, self.record = sides, record
        tensors = [*tensors_of(sides.reference.model, ()), *tensors_of(sides.tested.model, [call])]
        self.generators = RandomState(sides.tested.region.device, tensors)
        self.waiting: Returned | None = None
        self.early: dict[CallKey, tuple[Gradients, Gradients]] = {}
        self.own_gradients: dict[str, torch.Tensor] = {}
        self.unknown_own: set[str] = set()
        self.call, self.loss = call, loss
        self.handoff = Handoff()

    def hand_over(self, side: Side) -> None:
        """Let the other run continue, then restore this run's state of the model, generators and gradients."""
        state, random = side.state.current(), self.generators.get()
        gradients = [] if self.loss is None else side.gradients.current()
        if gradients and self.sides.have_one_model:
            side.gradients.put(side.gradients.none())
        self.handoff.hand_over()
        self.sides.activate(side)
        side.state.put(state)
        if self.loss is not None:
            side.gradients.put(gradients)
        self.generators.set(random)

    def add_own_gradients(self, gradients: Gradients) -> None:
        """Add the gradients of the parameters in a repeated call."""
        for name, gradient in zip(self.sides.tested.gradients.names, gradients, strict=True):
            if gradient is not None:
                known = self.own_gradients.get(name)
                self.own_gradients[name] = gradient if known is None else known.add_(gradient)

    def note_unrepeatable(self, module: torch.nn.Module) -> None:
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
