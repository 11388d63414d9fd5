"""``compare``: a model in float32 against the same model in a region, module by module.

The two run in lockstep, each once, and hand each other one module's output at a time. What a module adds by itself is
found by running it once more where float32's run has just left it: in the region, on float32's inputs, with the modules
in it in float32. What is left of the difference came in by its inputs.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from ..errors import warn_user
from ..observer.low_bit_counts import LowBitCounts
from ..plugins.discovery import check_availability, check_recipe
from ..plugins.registry import get_backend
from ..policy.recipe import NoRecipe, Recipe, RecipeLike, read_recipe
from ..policy.value import Policy, PolicyLike
from ..region.autocast import autocast, why_disabled
from ..region.module_rules import apply_policy
from .calls import Call
from .comparison import Comparison, ModuleErrors
from .errors import Error, NonFinite, Sums, is_finite
from .hooks import Key
from .lockstep import Lockstep, Met
from .progress import progress
from .survey import Survey, survey
from .values import tensors_in

_ACCOUNTED = 4.0
"""How many times more than any of the modules in it a module may add, and it is still they who do."""


def compare(
    model: torch.nn.Module,
    inputs: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    policy: PolicyLike | None = None,
    recipe: RecipeLike | None = None,
) -> Comparison:
    """Run a model in float32 and in a region, and say for each module how far apart they are, and what adds to that.

    Both runs are under ``no_grad``, with the same random numbers, in the mode (``train`` or ``eval``) that the model is
    in. The model is left as it was: parameters, buffers, attributes, gradients, hooks. Compiled modules run uncompiled.
    The run in the region has a thread of its own, with a copy of the caller's context (``contextvars``), and without
    what the caller's thread has in a ``threading.local``.
    At no time is more than one module's output kept besides what two runs of the model take; arguments that a module
    writes to are copied, as long as it runs.

    Args:
        model: a module, on the device; what it computes outside all regions is the reference.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments for the model's forward.
        device_type, dtype, policy, recipe: of the region, as in :class:`autocast`. What the recipe computed, and what
            it declined, is in the comparison.

    Returns:
        A value that ``print`` shows as a table, with the modules first that add most to the error.

    Raises:
        TypeError: `model` or `inputs` is none of these.
        RuntimeError: the region cannot run enabled, or not with the recipe; or the model's forward writes to its
            parameters.
        ValueError, RuntimeError: as :class:`autocast`.

    Warns:
        UserWarning: there is inf or nan in float32's own output.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> comparison = polycast.compare(model, torch.randn(2, 4), "cpu")
        >>> comparison.modules[0].name, comparison.modules[0].own.relative < 0.02
        ('0', True)
    """
    call, said = Call.of(model, inputs), Policy.of(policy or {})
    wanted = wanted_recipe(recipe)
    region = enabled_region(device_type, dtype, _of_ops(said), wanted)
    seen, output = survey(model, call, region.device)
    unsound = NonFinite.of(output)
    if unsound.inf or unsound.nan:
        warn_user(unsound.warning("no error of these is known"))
    del output
    with apply_policy(model, Policy(modules=said.for_device(region.device).modules)):
        return compared(model, call, region, seen, wanted)


def _of_ops(policy: Policy) -> Policy:
    """Return the part of a policy that regions take: all but the rules for modules."""
    return Policy(policy.ops, devices={device: Policy(part.ops) for device, part in policy.devices.items()})


def wanted_recipe(recipe: RecipeLike | None) -> Recipe | None:
    """Return the recipe that is given, if it is one in which something is computed.

    Raises:
        TypeError, ValueError: it is no recipe.
    """
    wanted = None if recipe is None else read_recipe(recipe)
    return None if isinstance(wanted, NoRecipe) else wanted


def enabled_region(
    device_type: str, dtype: torch.dtype | None, policy: PolicyLike | None = None, recipe: Recipe | None = None
) -> autocast:
    """Return a region that runs enabled, by a recipe if one is given.

    Raises:
        RuntimeError: it cannot.
    """
    backend = get_backend(device_type)
    region = autocast(device_type, dtype, enabled=False, policy=policy)
    refusal = why_disabled(backend, region.fast_dtype, check_availability(backend))
    if refusal is not None:
        raise RuntimeError(refusal.replace("Disabling autocast.", "There is no region to look at.", 1))
    if recipe is not None:
        answer = check_recipe(backend, recipe)
        if not answer:
            raise RuntimeError(
                f"{recipe!r} cannot be used on {region.device}: {answer.reason}. There is no region to look at."
            )
    return autocast(device_type, region.fast_dtype, policy=policy, recipe=recipe)


def compared(
    model: torch.nn.Module, call: Call, region: autocast, seen: Survey, recipe: Recipe | None = None
) -> Comparison:
    """Compare a model in float32 with the same model in a region, given what a first run has shown."""
    with progress("comparing", seen.calls) as advance:
        record = _Record(seen, advance)
        reference, output = Lockstep(model, call, region, seen, record).run()
    return Comparison(
        region.device,
        region.fast_dtype,
        record.modules(),
        MappingProxyType(_outputs(reference, output)),
        record.first_nonfinite,
        tuple(record.parted_in),
        recipe,
        record.low_bit.records(),
    )


class _Found:
    """What is found of a module, over all its calls."""

    def __init__(self) -> None:
        self.own, self.total, self.inherited, self.inputs = Sums(), Sums(), Sums(), Sums()
        self.calls = 0
        self.makes_nonfinite = False


class _Record:
    """Adds up what the two runs hand over."""

    def __init__(self, seen: Survey, advance: Callable[[str], None]) -> None:
        self.found = {module: _Found() for module in seen.modules}
        self.first_nonfinite: str | None = None
        self.parted_in: dict[str, None] = {}
        self.low_bit = LowBitCounts()
        self._seen, self._advance = seen, advance
        self._makers: list[Key] = []

    def own(self, module: torch.nn.Module, reference: Any, own: Any) -> None:
        self.found[module].own.add(Sums.of(reference, own))
        self._advance(self._seen.modules[module].name or type(module).__name__)

    def total(self, call: Met) -> None:
        found, total = self.found[call.module], Sums.of(call.reference, call.output)
        found.calls += 1
        found.total.add(total)
        found.inherited.add(Sums.of(call.own, call.output))
        found.inputs.add(Sums.of(call.reference_arguments, call.arguments))
        in_it = any(other[: len(call.key)] == call.key for other in self._makers)
        if total.made and not in_it and is_finite(call.arguments):
            self._makers.append(call.key)
            found.makes_nonfinite = True
            if self.first_nonfinite is None:
                self.first_nonfinite = self._seen.modules[call.module].name

    def parted(self, module: torch.nn.Module) -> None:
        self.parted_in[self._seen.modules[module].name] = None

    def modules(self) -> tuple[ModuleErrors, ...]:
        """Return the modules, those first that add most."""
        adds = self._adds()
        said = []
        for module, called in self._seen.modules.items():
            found = self.found[module]
            known = found.calls == called.calls
            said.append(
                ModuleErrors(
                    called.name,
                    type(module).__name__,
                    called.calls,
                    adds[called.name],
                    found.own.error(),
                    found.inherited.relative_to(found.total) if known else None,
                    found.total.error() if known else None,
                    found.makes_nonfinite,
                )
            )
        return tuple(sorted(said, key=lambda each: (-each.adds, -(each.inherited or 0.0))))

    def _adds(self) -> dict[str, float]:
        """Return by name what each module adds: from the innermost on, for what those inside add is not added again."""
        adds: dict[str, float] = {}
        inside: dict[str | None, float] = {}
        for module, called in reversed(self._seen.modules.items()):
            found = self.found[module]
            before, after = found.inputs.relative, found.total.relative
            growth = after - before if before < after else 0.0
            accounted = growth <= _ACCOUNTED * inside.get(called.name, 0.0)
            adds[called.name] = max(found.own.relative, 0.0 if accounted else growth)
            for caller in called.callers:
                largest = max(adds[called.name], inside.get(called.name, 0.0))
                inside[caller] = max(inside.get(caller, 0.0), largest)
        return adds


def _outputs(reference: Any, output: Any) -> dict[str, Error]:
    got = dict(tensors_in(output))
    return {
        name or "output": Sums.of(tensor, got.get(name)).error()
        for name, tensor in tensors_in(reference)
        if tensor.is_floating_point() or tensor.is_complex()
    }
