"""Programs of other people's libraries, run with torch's autocast and with polycast's in its place."""

import contextlib

import pytest
import torch

import polycast
from polycast_plugins.dropin.shim import PatchedRegion


@pytest.fixture
def regions(monkeypatch):
    """The dtypes of polycast's regions that were entered through torch's names, by device, None for disabled ones."""
    seen = []

    def replace(region):
        settings = region._settings
        seen.append((settings.device_type, settings.dtype if settings.enabled else None))
        return region

    monkeypatch.setattr(PatchedRegion, "replace", replace)
    return seen


@pytest.fixture
def on_both(engine, regions):
    """Return a function that runs a program with torch's autocast, then with polycast's; returns what each returned.

    It sees to it that the second ran in regions of polycast's, and the first in none.
    """

    def run(program):
        results = []
        for patching in (contextlib.nullcontext(), polycast.patch_torch()):
            polycast.uninstall()
            torch.manual_seed(0)
            with patching:
                results.append(program())
            if not results[1:]:
                assert regions == []
        assert any(dtype is not None for _, dtype in regions)
        return results

    return run
