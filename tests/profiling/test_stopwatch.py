"""`Stopwatch` on devices that queue calls: it waits for them, if the device can be waited for."""

import pytest
import torch

from polycast.profiling.stopwatch import Stopwatch


class Queue:
    """A device whose calls return at once, and its clock."""

    def __init__(self):
        self.now = 0.0
        self.queued = 0.0
        self.waited = 0

    def call(self):
        self.queued += 1e-3

    def synchronize(self):
        self.waited += 1
        self.now += self.queued
        self.queued = 0.0


@pytest.fixture
def queue(monkeypatch):
    """Replace torch's accelerator by an xpu that queues calls; return its queue."""
    found = Queue()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", found.synchronize)
    return found


def test_queued_calls_are_waited_for_and_earlier_ones_do_not_count(queue):
    watch = Stopwatch("xpu", lambda: queue.now)
    queue.queued = 5.0
    assert watch.time(queue.call, calls=4) == pytest.approx(1e-3)
    assert queue.queued == 0.0


@pytest.mark.parametrize("device", ["cpu", "mtia"])
def test_other_devices_do_not_wait_for_it(queue, device):
    Stopwatch(device, lambda: queue.now).time(queue.call)
    assert queue.waited == 0


def test_without_an_accelerator_nothing_is_waited_for(queue, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    Stopwatch("xpu", lambda: queue.now).time(queue.call)
    assert queue.waited == 0


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AssertionError])
def test_a_device_that_cannot_be_waited_for_is_timed_by_its_calls(queue, error, monkeypatch):
    def fail():
        raise error("it has no streams")

    monkeypatch.setattr(torch.accelerator, "synchronize", fail)

    def call():
        queue.now += 2e-3

    assert Stopwatch("xpu", lambda: queue.now).time(call) == pytest.approx(2e-3)
