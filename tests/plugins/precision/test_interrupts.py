"""Ctrl-C in ``compare`` and ``tune``, at any point of either run, ends both at once, with the thread."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast_plugins.precision import sides

CALLS = {
    "compare": lambda model, x: polycast.compare(model, x),
    "tune": lambda model, x: polycast.tune(model, x, tolerance=0.0),
}


@pytest.fixture(autouse=True)
def interrupts_raise():
    """Install Python's handler: a shell has a background process ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def in_worker():
    return threading.current_thread().name == "polycast.compare"


def run_on():
    """Compute in Python for much longer than an interrupt may take."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        pass


def interrupted(when, then=run_on, interrupt=interrupt):
    """Return a model that interrupts the run if `when` returns true, and continues to compute."""

    def forward(self, x):
        y = self.layer(x)
        if when(y):
            interrupt()
            then()
        return self.other(y)

    return Defined(forward, layer=nn.Linear(4, 4), other=nn.Linear(4, 4))


def ends_at_once(call, model):
    x = torch.randn(2, 4)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(model, x)
    assert time.monotonic() - began < 3
    assert not in_worker()
    assert threads() == 0
    assert not torch.is_autocast_enabled("cpu")
    assert [len(each._forward_hooks) for each in model.modules()] == [0] * len(list(model.modules()))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("where", ["the region", "float32"])
def test_an_interrupt_of_one_run_ends_both(call, where):
    def when(y):
        return in_worker() if where == "the region" else not in_worker() and threads() > 0

    ends_at_once(call, nn.Sequential(nn.Linear(4, 4), interrupted(when)))


def threads():
    return [thread.name for thread in threading.enumerate()].count("polycast.compare")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_while_the_runs_call_different_modules_ends_both(call):
    chooses = Defined(
        lambda self, x: self.one(x) if self.gate(x).dtype is torch.float32 else self.two(x),
        gate=nn.Linear(4, 4),
        one=nn.Linear(4, 4),
        two=interrupted(lambda y: in_worker(), lambda: None),
    )
    ends_at_once(call, nn.Sequential(nn.Linear(4, 4), chooses, *(nn.Linear(4, 4) for _ in range(3))))


def test_a_run_that_catches_all_exceptions_ends_at_the_next_call_of_a_module():
    calls = []

    def forward(self, x):
        for _ in range(2):
            try:
                if in_worker() and not calls:
                    calls.append(1)
                    interrupt()
                    run_on()
            except BaseException:
                calls.append(2)
        if in_worker():
            self.layer(x)
            calls.append(3)
        return x

    stubborn = Defined(forward, layer=nn.Linear(4, 4))
    ends_at_once(CALLS["compare"], nn.Sequential(stubborn))
    assert calls == [1, 2]


def test_a_timeout_of_another_signal_handler_ends_both_runs():
    class Timeout(TimeoutError):
        pass

    def handler(number, frame):
        raise Timeout

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        model = interrupted(lambda y: in_worker(), interrupt=lambda: os.kill(os.getpid(), signal.SIGUSR1))
        for call in CALLS.values():
            with pytest.raises(Timeout):
                call(model, torch.randn(2, 4))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert threads() == 0


def test_an_interrupt_at_any_line_of_the_caller_ends_the_thread(monkeypatch):
    """Raised by a trace function at the first line of sides.py that runs, then at the second, and so on."""
    monkeypatch.setattr(sides, "_START", 0.1)
    lines = ended = 0

    def tracer(frame, event, arg):
        nonlocal lines
        if frame.f_code.co_filename != sides.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == ended:
                sys.settrace(None)
                raise KeyboardInterrupt
        return tracer

    while True:
        both, lines, ended = sides.Handoff(), 0, ended + 1

        def give(both=both):
            for _ in range(3):
                both.hand_over()

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            both.run(give, give)
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(before)
            assert threads() == 0, ended
        break
    assert ended > 40
