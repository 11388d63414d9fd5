"""An error of a signal handler, such as a timeout, leaves the right regions open at every point."""

import ctypes
import gc
import random
import signal
import sys

import pytest
import torch

import polycast
from polycast.engine import state

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="signals of POSIX")


class Timeout(BaseException):
    pass


@pytest.fixture(autouse=True)
def handler():
    def raise_timeout(*_):
        raise Timeout

    before = signal.signal(signal.SIGALRM, raise_timeout)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def region(monkeypatch):
    """A region whose methods are those of the native engine: those in Python have places where handlers run."""
    polycast.engine.installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "native")
    made = polycast.autocast("cpu")
    with made:  # what the first one puts in place is in place
        pass
    return made


@pytest.fixture
def pending():
    """Sends the signal that it is asked for, without Python's looking for signals then: the next call does."""

    class Sends:
        __getitem__ = staticmethod(ctypes.PyDLL(None)["raise"])

    return Sends()


def test_a_signal_that_comes_before_a_block_ends_strikes_once_its_region_is_left(region, pending):
    with pytest.raises(Timeout), region:
        pending[signal.SIGALRM]
    assert state.machine.nesting("cpu") == 0
    assert not torch.is_autocast_enabled("cpu")


def test_a_signal_that_comes_as_a_region_is_entered_strikes_where_the_region_is_left(region, pending):
    with pytest.raises(Timeout), (pending[signal.SIGALRM], region)[1]:
        pass
    assert state.machine.nesting("cpu") == 0


def test_an_error_while_kernels_are_installed_leaves_the_region(region, monkeypatch):
    class Struck:
        __hash__ = None  # Python asks for it once the region is entered

    region = polycast.autocast("cpu", policy={"softmax": "fp32"})
    monkeypatch.setattr(region._settings.override, "ready_key", Struck())
    with pytest.raises(TypeError, match="unhashable"), region:
        pass
    assert state.machine.nesting("cpu") == 0


def test_entering_and_leaving_run_no_python(region):
    seen = []

    def note(frame, event, _):
        seen.append((event, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        with region:
            pass
    finally:
        sys.setprofile(None)
    assert [name for event, name in seen if event == "call"] == []


@pytest.fixture
def _no_collection():
    """Collect no garbage: an exception in a callback of the collector, such as hypothesis has, is lost."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_timeouts_at_random_points_leave_no_region_open(region):
    delays = random.Random(0)
    for _ in range(300):
        with pytest.raises(Timeout):  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-6, 1e-4))
            while True:
                with region, region:
                    pass
        assert state.machine.nesting("cpu") == 0
