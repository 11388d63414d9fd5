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


@pytest.fixture(scope="module", name="engine", params=["native", "reference"])
def _engine(request):
    """Run the tests of a module on each engine of polycast's, with its kernels installed from the first to the last."""
    from polycast.engine.installation import forget_choice

    forget_choice()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("POLYCAST_ENGINE", request.param)
        yield request.param
        forget_choice()


@pytest.fixture(autouse=True)
def _leaves_no_region():
    yield
    assert polycast.autocast_nesting("npy") == 0
