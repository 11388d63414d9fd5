"""`Stopwatch`: devices that queue calls, which it waits for if possible; and whether it was preempted."""

import time

import pytest
import torch

from polycast_plugins.fastest import stopwatch
from polycast_plugins.fastest.stopwatch import PreemptionWatch, Stopwatch, disagree


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


@pytest.mark.parametrize(("device", "accelerator"), [("cpu", "xpu"), ("mtia", "xpu"), ("xpu", None)])
def test_other_devices_do_not_wait_for_it(queue, device, accelerator, monkeypatch):
    found = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    Stopwatch(device, lambda: queue.now).time(queue.call)
    assert queue.waited == 0


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AssertionError])
def test_a_device_that_cannot_be_waited_for_is_timed_by_its_calls(queue, error, monkeypatch):
    def fail():
        raise error("it has no streams")

    monkeypatch.setattr(torch.accelerator, "synchronize", fail)

    def call():
        queue.now += 2e-3

    assert Stopwatch("xpu", lambda: queue.now).time(call) == pytest.approx(2e-3)


@pytest.mark.parametrize(("switches", "ran", "preempted"), [(0, 0.0, False), (3, 0.5, True), (3, 1.0, False)])
def test_a_thread_was_preempted_if_the_system_says_so_and_time_was_lost(monkeypatch, switches, ran, preempted):
    times = {"switches": 5, "monotonic": 1.0, "thread_time": 1.0}
    monkeypatch.setattr(stopwatch, "_involuntary_switches", lambda: times["switches"])
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(time, name, lambda name=name: times[name])
    watch = PreemptionWatch()
    times.update(switches=5 + switches, monotonic=2.0, thread_time=1.0 + ran)
    assert watch.was_preempted() is preempted


def test_passes_disagree_if_the_least_time_was_seen_once():
    assert not disagree([9.0, 1.0, 3.0, 1.2])
    assert disagree([1.0, 1.3, 3.0])
    assert disagree([1.0])


def test_each_function_is_called_first_in_every_second_round_also_of_other_calls():
    called = []
    watch = Stopwatch("cpu")
    for _ in range(4):
        functions = {name: lambda name=name: called.append(name) for name in ("a", "b")}
        watch.time_interleaved(functions, {"a": 1.0, "b": 1.0}, 0.0)
    assert called == ["b", "a", "a", "b"] * 2


@pytest.mark.parametrize(("threads", "processors", "expected"), [(2, 1.5, 0.25), (2, 2.2, 0.0), (8, 3.0, 0.25)])
def test_the_load_of_others_is_the_processor_time_that_this_process_does_not_get(
    threads, processors, expected, monkeypatch
):
    now = iter(range(100))
    monkeypatch.setattr(stopwatch, "_available_processors", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    spent = iter((7.0, 7.0 + 2 * processors))
    monkeypatch.setattr(time, "process_time", lambda: next(spent))
    devices = set()
    monkeypatch.setattr(torch, "empty_like", lambda x: devices.add(x.device.type))
    with torch.device("meta"):  # a default device that computes nothing
        assert stopwatch.load_of_others() == pytest.approx(expected)
    assert devices == {"cpu"}
