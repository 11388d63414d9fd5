"""An error of a signal handler, such as a timeout, leaves the right regions open at every point."""

import contextlib
import ctypes
import functools
import gc
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import polycast
from polycast.engine import inference, state
from polycast.region import suspend, switched_off

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


class Strike:
    """Raises before the given bytecode of those that enter and leave regions, as a handler of a signal may."""

    FILES = str(Path(suspend.__file__).parent), inference.__file__

    def __init__(self, bytecode):
        self.left = bytecode

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.FILES):
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "opcode"):
            self.left -= 1
            if self.left == -1:
                raise Timeout
        return self.trace


def steps():
    yield torch.ones(1)
    yield torch.ones(1)


class Double(torch.autograd.Function):
    forward = staticmethod(polycast.custom_fwd(lambda ctx, x: x * 2, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(polycast.custom_bwd(lambda ctx, grad: grad * 2, device_type="cpu"))


def recomputed(reentrant, captured):
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    out = captured.wrap(lambda: checkpoint(layer, x, use_reentrant=reentrant))()
    return lambda: out.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda captured: captured.wrap(lambda: torch.ones(1)),
        lambda captured: lambda: list(captured.wrap(steps)()),
        functools.partial(recomputed, True),
        functools.partial(recomputed, False),
        lambda captured: captured.wrap(lambda: Double.apply(torch.ones(1, requires_grad=True)).backward()),
    ],
    ids=["a function", "a generator", "reentrant checkpoint", "checkpoint", "autograd.Function"],
)
def test_an_error_before_any_bytecode_that_enters_or_leaves_captured_regions_leaves_none_open(engine, make):
    with polycast.autocast("cpu", policy={"softmax": "fp32"}):
        captured = polycast.capture()
    make(captured)()  # what the first one puts in place is in place
    bytecode, strike = 0, None
    while strike is None or strike.left < 0:
        function, strike = make(captured), Strike(bytecode)
        with contextlib.suppress(Timeout), strike:
            function()
        del function
        assert (state.machine.nesting("cpu"), torch.is_autocast_enabled("cpu")) == (0, False), bytecode
        assert switched_off.current() is None
        bytecode += 1
    assert bytecode > 100
