"""Register the device for all tests."""

import pytest
import torch

import polycast
import polycast_npy


@pytest.fixture(autouse=True, scope="session")
def _device():
    polycast_npy.register_device()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(name="engine", params=["native", "reference"])
def _engine(request, monkeypatch):
    """Run a test once on each engine of polycast's."""
    from polycast.engine.installation import forget_choice

    forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", request.param)
    yield request.param
    assert polycast.autocast_nesting("npy") == 0
    forget_choice()
