"""Measure a device: time each op in each way, within a few seconds."""

import contextlib
from collections.abc import Iterator
from datetime import datetime, timezone

import torch

from polycast.errors import raise_if_callers
from polycast.plugin import Backend, call_outside, events

from .conditions import Conditions
from .device_profile import DeviceProfile
from .op_timer import OpTimer
from .ways import ways_of


def measure(backend: Backend) -> DeviceProfile:
    """Return a new profile of a backend's device.

    Raises:
        RuntimeError: the device is not available, or lacks ops to make tensors with.
    """
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
