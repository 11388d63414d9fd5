"""Fixtures that need plugins: profiles of devices."""

import os

import pytest

import polycast
import polycast.engine.native.engine_library  # reads the name of the folder before it is replaced below
from polycast.toolchain import cache_folder
from polycast_plugins.fastest import cases, estimates, profile
from polycast_plugins.fastest.measurement import Measurement


@pytest.fixture(scope="session", autouse=True)
def _own_profiles(tmp_path_factory):
    """Keep the profiles of the tests apart from the user's; builds, which others read, stay where they are."""
    folder = tmp_path_factory.mktemp("cache") / "polycast"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache_folder, "cache_directory", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch):
    """Hide the profile that an earlier test has measured, except from "fastest"; POLYCAST_PROFILE names one."""

    def hide(find):
        return lambda device: find(device) if os.environ.get("POLYCAST_PROFILE") else None

    for name in ("find", "find_profile"):
        monkeypatch.setattr(estimates, name, hide(getattr(estimates, name)))
    yield
    profile.forget()  # reads the variable again


@pytest.fixture(scope="session")
def profile_of():
    """Return a function that makes a profile of the CPU, given the time of each way in that of float32."""

    def profile_of(overhead=1e-6, cast=0.05e-9, **ways):
        """Return the profile. A way's value is a number, or one for each op, with ``other`` for the rest.

        Args:
            overhead: the seconds of a call without its work.
            cast: the seconds of converting an element.
        """
        ratios = {"float32": 1.0, **{name.replace("_", " "): each for name, each in ways.items()}}
        fast = [name for name in ratios if " " not in name and name != "float32"]
        measurements = [
            Measurement(op, rows, way, overhead + ratio * 1e-11 * rows * size, size)
            for op in cases.OPS[:-1]  # all but casts
            for way, given in ratios.items()
            if (ratio := given.get(op, given.get("other")) if isinstance(given, dict) else given) is not None
            for size in (2**12, 2**20)
            for rows in (1, 4, 16, 128, 1024)
        ]
        measurements += [
            Measurement("cast", elements, f"{direction} {name}", overhead + elements * cast)
            for name in fast
            for direction in ("to", "from")
            for elements in (1, 2**12, 2**20)
        ]
        return polycast.DeviceProfile("cpu", "a processor", 2, {}, {}, tuple(measurements), 1e13)

    return profile_of
