"""Record the errors of each module while ``compare`` runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..observer.low_bit_counts import LowBitCounts
from .comparison import ModuleErrors
from .hooks import CallKey
from .numerics import Sums, is_finite
from .profiling_run import Profile

_ACCOUNTED = 4.0
"""Modules inside account for a growth of the error that is at most this many times the largest of their own."""


class MatchedCall(NamedTuple):
    """A call that both runs have made.

    Attributes:
        key, module: the call.
        reference_arguments, arguments: the arguments in float32, and in the region; None if the module writes to them.
        reference, own, output: the output in float32, that of the module itself in the region, and that in the region.
    """

    key: CallKey
    module: torch.nn.Module
    reference_arguments: Any
    arguments: Any
    reference: Any
    own: Any
    output: Any


class _Found:
    """The errors of a module, over all its calls."""

    def __init__(self) -> None:
        self.own, self.total, self.inherited, self.inputs = Sums(), Sums(), Sums(), Sums()
        self.calls = 0
        self.makes_nonfinite = False


class Record:
    """Adds up the errors of all calls.

    Attributes:
        first_nonfinite: the first module that returned inf or nan where float32 does not, given finite inputs.
        parted_in: the modules in which the two runs made different calls.
        low_bit: counts the ops that recipes compute and decline in the region.
    """

    def __init__(self, profile: Profile, advance: Callable[[str], None]) -> None:
        self.first_nonfinite: str | None = None
        self.parted_in: dict[str, None] = {}
        self.low_bit = LowBitCounts()
        self._found = {module: _Found() for module in profile.modules}
        self._profile, self._advance = profile, advance
        self._nonfinite_calls: list[CallKey] = []

    def add_own(self, module: torch.nn.Module, reference: Any, own: Any) -> None:
        """Add the output of a call in float32, and that of the module itself in the region."""
        self._found[module].own.add(Sums.of(reference, own))
        self._advance(self._profile.modules[module].name or type(module).__name__)

    def add_matched(self, call: MatchedCall) -> None:
        """Add a call that both runs have made."""
        found, total = self._found[call.module], Sums.of(call.reference, call.output)
        found.calls += 1
        found.total.add(total)
        found.inherited.add(Sums.of(call.own, call.output))
        found.inputs.add(Sums.of(call.reference_arguments, call.arguments))
        inside = any(other[: len(call.key)] == call.key for other in self._nonfinite_calls)
        if total.made and not inside and is_finite(call.arguments):
            self._nonfinite_calls.append(call.key)
            found.makes_nonfinite = True
            if self.first_nonfinite is None:
                self.first_nonfinite = self._profile.modules[call.module].name

    def add_parted(self, module: torch.nn.Module) -> None:
        """Add a module in which the two runs make different calls."""
        self.parted_in[self._profile.modules[module].name] = None

    def modules(self) -> tuple[ModuleErrors, ...]:
        """Return the modules, beginning with the largest addition to the error."""
        adds = self._adds()
        errors = []
        for module, called in self._profile.modules.items():
            found = self._found[module]
            is_known = found.calls == called.calls
            errors.append(
                ModuleErrors(
                    called.name,
                    type(module).__name__,
                    called.calls,
                    adds[called.name],
                    found.own.error(),
                    found.inherited.relative_to(found.total) if is_known else None,
                    found.total.error() if is_known else None,
                    found.makes_nonfinite,
                )
            )
        return tuple(sorted(errors, key=lambda each: (-each.adds, -(each.inherited or 0.0))))

    def _adds(self) -> dict[str, float]:
        """Return by name the error that each module adds, computed from the innermost modules outwards."""
        adds: dict[str, float] = {}
        inside: dict[str | None, float] = {}
        for module, called in reversed(self._profile.modules.items()):
            found = self._found[module]
            before, after = found.inputs.relative, found.total.relative
            growth = after - before if before < after else 0.0
            accounted = growth <= _ACCOUNTED * inside.get(called.name, 0.0)
            adds[called.name] = max(found.own.relative, 0.0 if accounted else growth)
            for caller in called.callers:
                largest = max(adds[called.name], inside.get(called.name, 0.0))
                inside[caller] = max(inside.get(caller, 0.0), largest)
        return adds
