"""Uninstalling while threads start, enter regions and end: it succeeds or raises, and leaves nothing behind."""

import contextlib
import threading

import pytest
import torch

import polycast
from polycast.engine import state

MIXED = [torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)]


@pytest.fixture
def idle_threads():
    """Start threads that have been in a region, and now wait."""
    entered, end = threading.Barrier(65), threading.Event()

    def wait():
        with polycast.autocast("cpu"):
            pass
        entered.wait()
        end.wait()

    threads = [threading.Thread(target=wait) for _ in range(64)]
    for thread in threads:
        thread.start()
    entered.wait()
    yield
    end.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def starting_threads():
    """Start threads one after the other, which each compute in a region; return the list of their errors."""
    problems = []

    def compute():
        for _ in range(3):
            with polycast.autocast("cpu"):
                if any(torch.cat(MIXED).dtype is not torch.float32 for _ in range(3)):
                    problems.append("a region without its kernels")

    def start():
        for _ in range(500):
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()

    starter = threading.Thread(target=start)
    starter.start()
    yield problems
    starter.join()
    assert problems == []


@pytest.mark.slow
@pytest.mark.usefixtures("engine", "idle_threads", "switching_often", "starting_threads")
def test_while_a_region_is_open_it_is_refused_however_many_threads_come_and_go():
    with polycast.autocast("cpu"):
        for _ in range(5000):
            with pytest.raises(
                RuntimeError, match=r"^polycast's kernels for 'cpu' are in use: \d+ regions? (is|are) ope"
            ):
                polycast.uninstall()
        assert torch.cat(MIXED).dtype is torch.float32


@pytest.mark.usefixtures("engine", "idle_threads", "switching_often", "starting_threads")
def test_else_it_is_done_and_each_region_has_its_kernels():
    for _ in range(100):
        polycast.install("cpu")
        with contextlib.suppress(RuntimeError):
            polycast.uninstall()


@pytest.mark.usefixtures("engine")
def test_where_it_is_interrupted_the_next_takes_the_kernels_out(monkeypatch):
    def interrupt(device_type):
        raise KeyboardInterrupt

    polycast.install("cpu")
    with monkeypatch.context() as interrupted:
        interrupted.setattr(state.machine, "open_regions", interrupt)
        with pytest.raises(KeyboardInterrupt):
            polycast.uninstall()
    polycast.uninstall()
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.cat(MIXED)
