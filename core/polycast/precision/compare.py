"""``compare``: a model in float32 against the same model in a region, module by module.

The two runs are in lockstep, and hand each other one module's output at a time. The error of a module itself is found
by a repeated call when float32's run leaves the module: in the region, on float32's inputs, with the modules in it in
float32. The rest of its error comes from its inputs.
"""

from types import MappingProxyType
from typing import Any

import torch

from ..errors import warn_user
from ..plugins.checks import check_availability, check_recipe
from ..plugins.registry import get_backend
from ..policy.recipe import NoRecipe, Recipe, RecipeLike, read_recipe
from ..policy.value import Policy, PolicyLike
from ..region.autocast import autocast, why_disabled
from ..region.module_rules import apply_policy
from .calls import Call
from .comparison import Comparison
from .lockstep import Lockstep
from .numerics import Error, Sums
from .profiling_run import Profile, profile_run
from .progress import progress
from .record import Record
from .values import tensors_in


def compare(
    model: torch.nn.Module,
    inputs: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    policy: PolicyLike | None = None,
    recipe: RecipeLike | None = None,
) -> Comparison:
    """Run a model in float32 and in a region, and return the error of each module and where it comes from.

    Both runs are under ``no_grad``, with the same random numbers, in the model's current mode (``train`` or ``eval``).
    The model is restored: parameters, buffers, attributes, gradients, hooks. Compiled modules run eagerly. The run in
    the region has its own thread, with a copy of the caller's context (``contextvars``), but without the values in the
    caller's ``threading.local`` objects.
    Memory: the two runs of the model, one output of a module, and copies of arguments while a module that writes to
    them runs.

    Args:
        model: a module, on the device. Its results outside all regions are the reference.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments for the model's forward.
        device_type, dtype, policy, recipe: of the region, as in :class:`autocast`. The comparison also counts the ops
            that the recipe computed and declined.

    Returns:
        A value that ``print`` shows as a table, with the modules that add most to the error first.

    Raises:
        TypeError: `model` or `inputs` is of another type.
        RuntimeError: the region cannot run enabled, or not with the recipe; or the model's forward writes to its
            parameters.
        ValueError, RuntimeError: as :class:`autocast`.

    Warns:
        UserWarning: float32's own output contains inf or nan.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> comparison = polycast.compare(model, torch.randn(2, 4), "cpu")
        >>> comparison.modules[0].name, comparison.modules[0].own.relative < 0.02
        ('0', True)
    """
    call, given = Call.of(model, inputs), Policy.of(policy or {})
    wanted = wanted_recipe(recipe)
    region = enabled_region(device_type, dtype, given.without_modules(), wanted)
    profile, output = profile_run(model, call, region.device)
    sums = Sums.of(output, output)
    if sums.inf or sums.nan:
        warn_user(sums.nonfinite_warning("their error is unknown"))
    del output
    with apply_policy(model, Policy(modules=given.for_device(region.device).modules)):
        return compared(model, call, region, profile, wanted)


def wanted_recipe(recipe: RecipeLike | None) -> Recipe | None:
    """Return the given recipe, or None for no recipe and for ``"none"``.

    Raises:
        TypeError, ValueError: it is not a recipe.
    """
    wanted = None if recipe is None else read_recipe(recipe)
    return None if isinstance(wanted, NoRecipe) else wanted


def enabled_region(
    device_type: str, dtype: torch.dtype | None, policy: PolicyLike | None = None, recipe: Recipe | None = None
) -> autocast:
    """Return a region that runs enabled, with the recipe if one is given.

    Raises:
        RuntimeError: the region would run disabled, or without the recipe.
    """
    backend = get_backend(device_type)
    region = autocast(device_type, dtype, enabled=False, policy=policy)
    refusal = why_disabled(backend, region.fast_dtype, check_availability(backend))
    if refusal is not None:
        raise RuntimeError(refusal.replace("Disabling autocast.", "An enabled region is needed.", 1))
    if recipe is not None:
        answer = check_recipe(backend, recipe)
        if not answer:
            raise RuntimeError(f"{recipe!r} cannot be used on {region.device}: {answer.reason}")
    return autocast(device_type, region.fast_dtype, policy=policy, recipe=recipe)


def compared(
    model: torch.nn.Module, call: Call, region: autocast, profile: Profile, recipe: Recipe | None = None
) -> Comparison:
    """Compare a model in float32 with the same model in a region, given its profile."""
    with progress("comparing", profile.calls) as advance:
        record = Record(profile, advance)
        reference, output = Lockstep(model, call, region, profile, record).run()
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


def _outputs(reference: Any, output: Any) -> dict[str, Error]:
    got = dict(tensors_in(output))
    return {
        name or "output": Sums.of(tensor, got.get(name)).error()
        for name, tensor in tensors_in(reference)
        if tensor.is_floating_point() or tensor.is_complex()
    }
