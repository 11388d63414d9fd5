"""Measure a device: time each op in float32, the fast dtypes, kernels of the backend and recipes, in some seconds."""

import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone

import torch

from polycast.errors import raise_if_callers
from polycast.plugin import (
    Backend,
    LowBitKernel,
    Recipe,
    all_recipes,
    call_outside,
    check,
    dtype_name,
    events,
    recipe_kernels,
)

from .device_profile import DeviceProfile
from .measurement import Omission
from .op_timer import OpTimer
from .operands import MeasuredWay
from .profile_file import Conditions


def measure(backend: Backend) -> DeviceProfile:
    """Return a new profile of a backend's device."""
    return call_outside(_measure, backend)


def _measure(backend: Backend) -> DeviceProfile:
    ways, omissions = ways_of(backend)  # may compile C++, which is not part of the time
    conditions = Conditions.now(backend)
    with events.own_work.during(), _without_autocast(backend.device_type):
        try:
            timer = OpTimer(backend.device_type, ways)
        except Exception as error:  # a backend's ops may raise anything
            raise_if_callers(error)
            raise RuntimeError(f"{backend.device_type} cannot be measured: {type(error).__name__}: {error}") from error
        timer.run()
        return DeviceProfile(
            **vars(conditions),
            measurements=timer.measurements(),  # may add omissions
            bandwidth=timer.bandwidth(),
            other_load=timer.other_load(),
            date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
            omissions=(*omissions, *timer.omissions),
        )


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    """Switch autocast and autograd off in this thread."""
    was_enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    with torch.no_grad():
        torch.set_autocast_enabled(device_type, False)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device_type, was_enabled)
            torch.set_autocast_dtype(device_type, dtype)


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
