"""The record of errors that two runs of a comparison share, and the call at which one waits for the other."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from polycast_plugins.observe import RandomState, RecipeCounts

from .calls import CallKey, ModelCall, tensors_of
from .gradients import GradientCall, Gradients, aligned
from .measured import LossModule
from .profiling_run import ModelProfile, ModuleProfile
from .repeated import OwnGradients
from .results import GradientErrors, ModuleErrors
from .sides import Handoff, Side, Sides
from .values import Sums, is_finite

_ACCOUNTED = 4.0
"""Modules inside account for a growth of the error that is at most this many times the largest of their own."""

_VANISHING = 1e-5
"""A gradient smaller than the module's largest by this factor consists of rounding errors."""


class MatchedCall(NamedTuple):
    """A call that both runs have made. In backward, the arguments are gradients of outputs, the outputs of inputs.

    Attributes:
        key: the call.
        reference_arguments, arguments: the arguments in the reference's run and in the tested one; None if the module
            writes to them.
        reference, own, output: the output in the reference's run, that of the module itself in the tested run's way,
            and that in the tested run.
    """

    key: CallKey
    reference_arguments: Any
    arguments: Any
    reference: Any
    own: Any
    output: Any


class _Found:
    """The errors of a module, over all its calls."""

    def __init__(self) -> None:
        self.own, self.total, self.inherited, self.inputs = Sums(), Sums(), Sums(), Sums()
        self.expected = self.calls = self.repeated = 0
        self.makes_nonfinite = False
        self.is_inherited_known = True

    @property
    def is_matched(self) -> bool:
        """Whether the tested run has made all calls."""
        return self.calls == self.expected

    @property
    def is_repeated(self) -> bool:
        """Whether all calls have been repeated."""
        return self.repeated == self.expected

    def relative_inherited(self) -> float | None:
        """Return the relative error that comes from elsewhere, if it is known."""
        is_known = self.is_matched and self.is_repeated and self.is_inherited_known
        return self.inherited.relative_to(self.total) if is_known else None


class Errors:
    """Adds up the errors of all calls, in one direction.

    Attributes:
        first_nonfinite: the first module that made inf or nan where the reference does not, of finite arguments.
        found: the errors by name of a module.
    """

    def __init__(self) -> None:
        self.first_nonfinite: str | None = None
        self.found: dict[str, _Found] = defaultdict(_Found)
        self._nonfinite_calls: list[CallKey] = []

    def expect(self, key: CallKey) -> None:
        """Note a call of the reference's run."""
        self.found[key[-1][0]].expected += 1

    def add_own(self, name: str, reference: Any, own: Any) -> None:
        """Add the output of a call in the reference's run, and that of the module itself in the tested run's way."""
        found = self.found[name]
        found.repeated += 1
        found.own.add(Sums.of(reference, own))

    def add_matched(self, call: MatchedCall) -> None:
        """Add a call that both runs have made."""
        name = call.key[-1][0]
        found, total = self.found[name], Sums.of(call.reference, call.output)
        found.calls += 1
        found.total.add(total)
        if call.own is None:
            found.is_inherited_known = False
        else:
            found.inherited.add(Sums.of(call.own, call.output))
        found.inputs.add(Sums.of(call.reference_arguments, call.arguments))
        inside = any(other[: len(call.key)] == call.key for other in self._nonfinite_calls)
        if total.made and not inside and is_finite(call.arguments):
            self._nonfinite_calls.append(call.key)
            found.makes_nonfinite = True
            if self.first_nonfinite is None:
                self.first_nonfinite = name

    def adds(self, modules: Mapping[str, ModuleProfile]) -> dict[str, float]:
        """Return by name the error that each module adds, computed from the innermost modules outwards."""
        adds: dict[str, float] = {}
        inside: dict[str | None, float] = {}
        for name, called in reversed([*modules.items()]):
            found = self.found[name]
            before, after = found.inputs.relative, found.total.relative
            growth = after - before if before < after else 0.0
            accounted = growth <= _ACCOUNTED * inside.get(name, 0.0)
            adds[name] = max(found.own.relative, 0.0 if accounted else growth)
            for caller in called.callers:
                largest = max(adds[name], inside.get(name, 0.0))
                inside[caller] = max(inside.get(caller, 0.0), largest)
        return adds


class Record:
    """Adds up the errors of all calls, counts the ops of recipes, and notes the modules in which the runs parted."""

    def __init__(self, profile: ModelProfile, advance: Callable[[str], None]) -> None:
        self.outputs, self.gradients = Errors(), Errors()
        self.parted_in: dict[str, None] = {}
        self.recipe_counts = RecipeCounts()
        self._modules = profile.by_name()
        self._kinds = {each.name: type(module).__name__ for module, each in profile.modules.items()}
        self._advance = advance
        self._parameters: dict[str, _Found] = defaultdict(_Found)

    def add_own(self, name: str, reference: Any, own: Any) -> None:
        """Add the output of a call in the reference's run, and that of the module itself in the tested run's way."""
        self.outputs.add_own(name, reference, own)
        self._advance(name or self._kinds[name])

    def add_parameters(
        self,
        reference: Mapping[str, torch.Tensor | None],
        own: Mapping[str, torch.Tensor],
        tested: Mapping[str, torch.Tensor | None],
        unknown_own: Collection[str] = (),
    ) -> None:
        """Add the gradients of the parameters in both runs, and those of repeated calls."""
        for name, expected in reference.items():
            if name not in tested:
                continue
            one, two, three = aligned([expected], [own.get(name)], [tested[name]])
            if not one:  # the loss does not depend on it
                continue
            found = self._parameters[name]
            found.is_inherited_known &= name not in unknown_own
            found.own.add(Sums.of(one, two))
            found.inherited.add(Sums.of(two, three))
            found.total.add(Sums.of(one, three))

    def modules(self) -> tuple[ModuleErrors, ...]:
        """Return the modules, beginning with the largest addition to the error."""
        adds = self.outputs.adds(self._modules)
        errors = []
        for name, called in self._modules.items():
            found = self.outputs.found[name]
            is_known = found.calls == called.calls
            errors.append(
                ModuleErrors(
                    name,
                    self._kinds[name],
                    called.calls,
                    adds[name],
                    found.own.error(),
                    found.inherited.relative_to(found.total) if is_known and found.is_inherited_known else None,
                    found.total.error() if is_known else None,
                    found.makes_nonfinite,
                )
            )
        return tuple(sorted(errors, key=lambda each: (-each.adds, -(each.inherited or 0.0))))

    def gradient_errors(self) -> tuple[GradientErrors, ...]:
        """Return the errors of gradients, beginning with the largest addition to the error."""
        adds = self.gradients.adds(self._modules)
        errors = []
        largest: dict[str, float] = {}
        for name, found in self._parameters.items():
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, 0.0), found.total.norm)
        for name, found in self._parameters.items():
            module, _, parameter = name.rpartition(".")
            added, own_error, inherited = 0.0, None, None
            if found.is_inherited_known:
                own_error, inherited = found.own.error(), found.inherited.relative_to(found.total)
                vanishes = found.total.norm < _VANISHING * largest[module]
                added = found.own.norm_of_error / largest[module] if vanishes else own_error.relative
            errors.append(GradientErrors(module, parameter, added, own_error, inherited, found.total.error(), False))
        for name in self._modules:
            found = self.gradients.found[name]
            if found.total.elements or found.own.elements:
                errors.append(
                    GradientErrors(
                        name,
                        "",
                        adds[name],
                        found.own.error() if found.is_repeated else None,
                        found.relative_inherited(),
                        found.total.error() if found.is_matched else None,
                        found.makes_nonfinite,
                    )
                )
        return tuple(sorted(errors, key=lambda each: (-each.adds, -(each.inherited or 0.0))))


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
