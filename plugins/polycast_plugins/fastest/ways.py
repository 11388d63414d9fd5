"""The ways in which an op can be computed on a device: float32, the fast dtypes, kernels of the backend, recipes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from polycast.errors import raise_if_callers
from polycast.plugin import Backend, LowBitKernel, Recipe, all_recipes, check, dtype_name, recipe_kernels

from .measurement import Omission


@dataclass(frozen=True)
class MeasuredWay:
    """A way to compute ops.

    Attributes:
        name: as in a `Measurement`.
        dtype: the dtype of the activations, and of the weights unless a kernel prepacks them.
        fast: the fast dtype that a kernel returns.
        kernels: the first kernel of each op; None: torch's are used.
    """

    name: str
    dtype: torch.dtype
    fast: torch.dtype
    kernels: Mapping[str, LowBitKernel] | None = None


def ways_of(backend: Backend) -> tuple[list[MeasuredWay], list[Omission]]:
    """Return the ways that a backend offers, and why others are not available. This may compile C++."""
    ways = [MeasuredWay("float32", torch.float32, backend.default_dtype)]
    omitted = []
    available = check(backend)
    if not available:
        raise RuntimeError(f"{backend.device_type} cannot be measured: {available.reason}")
    for dtype in backend.supported_dtypes():
        answer = check(backend, dtype)
        if answer:
            ways.append(MeasuredWay(dtype_name(dtype), dtype, dtype))
        else:
            omitted.append(Omission("all ops", dtype_name(dtype), answer.reason))
    for recipe in all_recipes():
        answer = check(backend, recipe)
        if not answer:
            omitted.append(Omission("all ops", recipe.kind, answer.reason))
            continue
        try:
            kernels = {op: first.kernel for op, (first, *_) in recipe_kernels(backend, recipe).items()}
        except (Exception, SystemExit) as error:
            raise_if_callers(error)
            omitted.append(Omission("all ops", recipe.kind, f"{type(error).__name__}: {error}"))
        else:
            ways += _ways_by(recipe, kernels, backend)
    return ways, omitted


def _ways_by(recipe: Recipe, kernels: Mapping[str, LowBitKernel], backend: Backend) -> list[MeasuredWay]:
    if recipe.needs_kernels:
        return [MeasuredWay(recipe.kind, backend.default_dtype, backend.default_dtype, kernels)]
    of_fast_dtype = {op: kernel for op, kernel in kernels.items() if kernel.uses_cast}
    dtypes = backend.supported_dtypes() if of_fast_dtype else ()
    ways = [MeasuredWay(f"{dtype_name(dtype)} kernel", dtype, dtype, of_fast_dtype) for dtype in dtypes]
    of_float32 = {op: kernel for op, kernel in of_fast_dtype.items() if kernel.takes_float32}
    return (
        [*ways, MeasuredWay("float32 kernel", torch.float32, backend.default_dtype, of_float32)] if of_float32 else ways
    )
