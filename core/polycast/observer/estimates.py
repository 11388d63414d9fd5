"""Estimate the time of matmuls from the profile of a device; nothing is measured."""

from collections.abc import Iterable

from ..profiling.device_profile import DeviceProfile
from ..profiling.profile import find_or_none
from .recorder import MatmulRow


class Profiles:
    """The profiles of the devices of a run.

    Args:
        devices: the device types of its regions.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self._found = {device: find_or_none(device) for device in devices}

    def of(self, device: str | None) -> DeviceProfile | None:
        """Return the profile of a device; for None, as in a backward pass, that of the only device of the run."""
        if device is None:
            return next(iter(self._found.values())) if len(self._found) == 1 else None
        return self._found.get(device)


def estimated_seconds(profile: DeviceProfile, matmuls: MatmulRow) -> dict[str, float]:
    """Return the seconds of matmuls in each way that the profile has."""
    size = max(1, round(matmuls.flops / (2 * matmuls.rows * matmuls.calls)))
    found = {}
    for way in profile.ways(matmuls.kind):
        seconds = profile.seconds(matmuls.kind, matmuls.rows, way, size)
        if seconds is not None:
            found[way] = matmuls.calls * seconds
    return found
