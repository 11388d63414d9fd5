"""Find the modules whose matmuls a profile of the device says are faster in float32 than in the fast dtype."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.fastest.choose_way import Way, name_of, seconds_by_way
from ..engine.fastest.workloads import Workload, workload_of
from ..policy.schemas import flatten_arguments
from ..profiling.device_profile import DeviceProfile
from ..profiling.profile import find_ignoring_errors
from ..region.autocast import autocast
from ..torch_internals.dispatcher import OpOverload
from ..torch_internals.private_names import DispatchMode
from .calls import in_this_thread, watched

_MARGIN = 0.97
"""Float32 has to take less than this part of the fast dtype's time."""


def modules_faster_in_float32(model: nn.Module, call: Callable[[], object], region: autocast) -> list[nn.Module] | None:
    """Run a model once in a region, and return the modules that are faster in float32; None without a profile.

    A module counts without the modules in it. Nothing is measured.
    """
    profile = find_ignoring_errors(region.device)
    if profile is None:
        return None
    clock = _ProfileClock(profile, region.fast_dtype)
    with watched(model, in_this_thread(clock)), region, clock:
        call()
    return [module for module, seconds in clock.seconds.items() if seconds[Way.FLOAT32] < _MARGIN * seconds[Way.FAST]]


class _ProfileClock(DispatchMode):  # type: ignore[misc]
    """A watcher that adds up the seconds that a profile has for the matmuls of each module, in two ways."""

    def __init__(self, profile: DeviceProfile, dtype: torch.dtype) -> None:
        super().__init__()
        self._profile, self._dtype = profile, dtype
        self._ways = {way: name_of(way, dtype) for way in (Way.FAST, Way.FLOAT32)}
        self._open: list[nn.Module] = []
        self.seconds: dict[nn.Module, dict[Way, float]] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(module)

    def leave(self, module: nn.Module, output: Any) -> None:
        while self._open.pop() is not module:
            pass

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._open and isinstance(result, torch.Tensor) and result.dtype is self._dtype:
            name: Any = func.name()  # type: ignore[no-untyped-call]
            workload = _workload_of(name, flatten_arguments(func, args, kwargs or {}))
            found = {} if workload is None else seconds_by_way(self._profile, workload, self._ways)
            if len(found) == len(self._ways):
                of_module = self.seconds.setdefault(self._open[-1], dict.fromkeys(self._ways, 0.0))
                for way, seconds in found.items():
                    of_module[way] += seconds
        return result


def _workload_of(op: str, args: list[Any]) -> Workload | None:
    if op != "aten::convolution":
        return workload_of(op, args)
    is_transposed = args[6]
    return None if is_transposed else workload_of("aten::conv2d", [*args[:6], args[8]])
