"""Fixtures: an empty cache, and a measurement that takes no time."""

import pytest
import torch

import polycast
from polycast.profiling import measure as measuring
from polycast.profiling import profile as profiles
from polycast.profiling import profile_file
from polycast.profiling.conditions import Conditions
from polycast.profiling.measurement import Measurement


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the folder of the profiles, which is not there yet."""
    monkeypatch.setattr(profile_file, "cache_directory", lambda: tmp_path / "polycast")
    monkeypatch.delenv("POLYCAST_PROFILE", raising=False)
    profiles.forget()
    yield tmp_path / "polycast" / "profiles"
    profiles.forget()


class Measured:
    """What stands in for measuring: it counts, and can be made to do something else."""

    def __init__(self):
        self.count = 0
        self.times = {}
        self.noisy = False
        self.instead = lambda: None

    def __call__(self, backend):
        self.count += 1
        self.instead()
        now = Conditions.now(backend)
        times = {"float32": 1e-3, "bfloat16": 2e-3 + self.count * 1e-4, **self.times}
        return polycast.DeviceProfile(
            now.device_type,
            now.device,
            now.threads,
            now.versions,
            now.details,
            tuple(Measurement("linear", 128, way, each, noisy=self.noisy) for way, each in times.items()),
            1e10,
        )


@pytest.fixture
def measured(kept, monkeypatch):
    """Replace measuring by something quick."""
    found = Measured()
    monkeypatch.setattr(measuring, "measure", found)
    return found


@pytest.fixture
def threads():
    """Return torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
