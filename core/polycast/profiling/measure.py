"""Measure a device: time each op in each way, within a few seconds.

A way that is hopelessly slow must not take minutes. So cases are measured in order of their work, and what would take
too long by the case before it is extrapolated from that.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..plugins.backend import Backend
from ..torch_internals.names import disable_current_modes
from .cases import Case, Unsupported, cases
from .conditions import Conditions
from .device_profile import DeviceProfile
from .measurement import Measurement, Omission
from .operands import Operands
from .stopwatch import Stopwatch
from .table import FLOAT32
from .ways import Way, ways_of

_SECONDS = 2.4
"""The time for all measurements, from which on cases are extrapolated."""
_CASE_SECONDS = 0.05
_PATIENCE = 0.01
_LONGEST_CALL = 0.06
"""Calls that would take more seconds are extrapolated."""


def measure(backend: Backend) -> DeviceProfile:
    """Return a new profile of a backend's device.

    Raises:
        RuntimeError: the device is not available, or no op can be computed in float32.
    """
    ways, omissions = ways_of(backend)  # may compile C++, which is not part of the time
    conditions = Conditions.now(backend)
    with _without_autocast(backend.device_type):
        survey = Survey(backend.device_type, ways)
        survey.run()
        bandwidth = survey.bandwidth()
    return DeviceProfile(
        conditions.device_type,
        conditions.device,
        conditions.threads,
        conditions.versions,
        conditions.details,
        tuple(survey.measurements),
        bandwidth,
        (*omissions, *survey.omissions),
    )


class Survey:
    """Times the cases on a device, in order of their work."""

    def __init__(self, device_type: str, ways: list[Way]) -> None:
        self.measurements: list[Measurement] = []
        self.omissions: list[Omission] = []
        self._device_type = device_type
        self._ways = ways
        self._casts = [
            replace(way, name=f"{direction} {way.name}")
            for way in ways
            if way.kernels is None and way.name != FLOAT32
            for direction in ("to", "from")
        ]
        self._operands = Operands(device_type)
        self._stopwatch = Stopwatch(device_type)
        self._rates: dict[tuple[str, str], float] = {}
        """The least seconds by unit of work, by op and way."""

    def run(self) -> None:
        """Time all cases."""
        deadline = time.perf_counter() + _SECONDS
        for case in cases():
            self._time(case, deadline - time.perf_counter())
        self.measurements.sort(key=lambda each: (each.op == "cast", _order(each.op), each.size, each.rows))

    def bandwidth(self) -> float:
        """Return the rate at which memory is read: the best of a sum and of products with one row."""
        whole = self._operands.whole()
        seconds = min(self._stopwatch.time(whole.sum) for _ in range(5))
        rates = [whole.nbytes / seconds]
        for each in self.measurements:
            if each.op == "linear" and each.rows == 1 and each.size > 2**16 and not each.noisy:
                width = next((way.dtype.itemsize for way in self._ways if way.name == each.way and not way.kernels), 0)
                rates.append(each.size * width / each.seconds)
        return max(rates)

    def _time(self, case: Case, left: float) -> None:
        sides: dict[str, Callable[[], object]] = {}
        once: dict[str, float] = {}
        for way in self._casts if case.op == "cast" else self._ways:
            rate = self._rates.get((case.op, way.name))
            if rate is not None and (predicted := rate * case.work) > min(_LONGEST_CALL, left / 10):
                self._add(case, way.name, predicted, extrapolated=True)
                continue
            try:
                side = _with_dtype(case.prepare(way, self._operands), self._device_type, way.fast)
                once[way.name] = self._stopwatch.estimate(side, _PATIENCE)
            except Unsupported as reason:
                self._omit(case, way, str(reason))
            except Exception as error:  # a backend's kernels may raise anything
                self._omit(case, way, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            else:
                sides[way.name] = side
        if sides:
            for name, timing in self._stopwatch.race(sides, once, min(_CASE_SECONDS, left / 10)).items():
                rate = timing.seconds / case.work
                self._rates[case.op, name] = min(rate, self._rates.get((case.op, name), rate))
                self._add(case, name, timing.seconds, noisy=timing.noisy)

    def _add(self, case: Case, way: str, seconds: float, noisy: bool = False, extrapolated: bool = False) -> None:
        self.measurements.append(Measurement(case.op, case.rows, way, seconds, case.size, noisy, extrapolated))

    def _omit(self, case: Case, way: Way, reason: str) -> None:
        omission = Omission(case.op, way.name, reason)
        if omission not in self.omissions:
            self.omissions.append(omission)


_OPS = ("linear", "matmul", "conv2d", "bmm", "scaled_dot_product_attention", "cast")


def _order(op: str) -> int:
    return _OPS.index(op)


def _with_dtype(call: Callable[[], object], device_type: str, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that makes a call with a fast dtype set, which kernels of backends read."""

    def with_dtype() -> None:
        torch.set_autocast_dtype(device_type, dtype)
        call()

    return with_dtype


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    """Switch autocast, autograd and what intercepts ops off in this thread."""
    was_enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        torch.set_autocast_enabled(device_type, False)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device_type, was_enabled)
            torch.set_autocast_dtype(device_type, dtype)
