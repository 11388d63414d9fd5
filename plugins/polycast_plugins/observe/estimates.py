"""Estimate the time of matmuls from the profile of a device; nothing is measured."""

from collections.abc import Iterable

from polycast_plugins.fastest.profile import find_ignoring_errors

from .recorder import MatmulRow


class DeviceProfiles:
    """The profiles of the devices of a run.

    Args:
        devices: the device types of its regions.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self._found = {device: find_ignoring_errors(device) for device in devices}

    def seconds(self, matmuls: MatmulRow, device: str | None) -> dict[str, float]:
        """Return the seconds of matmuls in each way that the profile of their device has; empty without a profile.

        For None, as in a backward pass, the profile is that of the only device of the run.
        """
        if device is None and len(self._found) == 1:
            (device,) = self._found
        profile = None if device is None else self._found.get(device)
        if profile is None:
            return {}
        size = max(1, round(matmuls.flops / (2 * matmuls.rows * matmuls.calls)))
        times = {way: profile.seconds(matmuls.kind, matmuls.rows, way, size) for way in profile.ways(matmuls.kind)}
        return {way: matmuls.calls * seconds for way, seconds in times.items() if seconds is not None}
