"""The kernels for a recipe on a device: those of its backend, and of extensions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..policy.recipe import Recipe
from ..torch_internals.callers_state import call_outside
from .backend import Availability, Backend, Extension, LowBitKernel, no_kernels
from .checks import ask
from .registry import registry


class Offer(NamedTuple):
    """A kernel for a recipe.

    Attributes:
        kernel: the kernel.
        by: the backend or extension that has it.
        package, version: the distribution that supplies that; empty for a backend that is registered by hand.
    """

    kernel: LowBitKernel
    by: Extension
    package: str
    version: str


def check(backend: Backend, wanted: torch.dtype | Recipe | None = None) -> Availability:
    """Return whether the device of a backend can be used; or whether it supports a fast dtype, or a recipe.

    An affirmative answer is kept; after any other, the backend is asked again. One that raises does not support it. For
    a recipe, the extensions of the device are asked too, until one of them, or the backend, has kernels.

    Args:
        backend: the backend.
        wanted: the dtype or the recipe; None: the device itself.
    """
    return check_recipe(backend, wanted) if isinstance(wanted, Recipe) else ask(backend, wanted)


def check_recipe(backend: Backend, recipe: Recipe) -> Availability:
    """Return whether a device supports a recipe: whether its backend, or an extension of the device, has kernels."""
    refusals = []
    for given in (backend, *registry.extensions(backend.device_type)):
        answer = ask(given, recipe)
        if answer.available:
            return answer
        refusals.append((registry.source(given)[0], answer.reason))
    common = no_kernels(backend.device_type, recipe)
    refusals = [each for each in refusals if each[1] != common]
    if not refusals:
        return Availability(False, common)
    if len(refusals) == 1:
        return Availability(False, refusals[0][1])
    return Availability(False, "; ".join(f"{package or 'the backend'}: {reason}" for package, reason in refusals))


def recipe_kernels(backend: Backend, recipe: Recipe) -> Mapping[str, Sequence[Offer]]:
    """Return the kernels for a recipe, by dispatcher name of the op, in the order in which they are asked.

    They are those of the backend, then those of the extensions of its device. The first whose ``unsupported_reason``
    is None computes a call. Each has a `kernel`, and the `package` that supplies it.
    """
    found: dict[str, list[Offer]] = {}
    for given in (backend, *registry.extensions(backend.device_type)):
        if ask(given, recipe).available:
            for op, kernel in call_outside(given.low_bit_kernels, recipe).items():
                found.setdefault(op, []).append(Offer(kernel, given, *registry.source(given)))
    return found
