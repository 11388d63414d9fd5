"""Forks, and leaving a region, while a thread clears torch's own cache of casts, or waits to clear it."""

import os

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork"),
]

CACHED = """
import os, signal, threading, time

begun, forks, waited = threading.Event(), threading.Event(), []


def pause():
    if not waited:  # it is the first fork
        forks.set()
        waited.append(begun.wait(10))


if PAUSES:
    os.register_at_fork(before=pause)  # before polycast is imported: called once its locks are taken

import torch
from torch.utils._python_dispatch import TorchDispatchMode
import polycast
from polycast.engine import state


class Ends:
    def __del__(self):  # while torch's cache is cleared
        begun.set()
        forks.wait()
        time.sleep(0.5)


class Marks(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.mm.default:
            args[1].ends = Ends()  # the cast in torch's cache, whose Python object lives on
        return op(*args, **(kwargs or {}))


def clear():
    CLEARS


def enter_and_leave():
    with polycast.autocast("cpu"):
        pass


weight = torch.nn.Parameter(torch.ones(2, 2))
torch.set_autocast_enabled("cpu", True)
with Marks():
    torch.mm(torch.ones(2, 2), weight)  # by torch's kernel
torch.set_autocast_enabled("cpu", False)
"""

CLEARING = """
thread = threading.Thread(target=clear)
thread.start()
begun.wait()
os.register_at_fork(before=forks.set)  # before the locks are taken
child = os.fork()
if not child:
    signal.alarm(20)
    clear()
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""

PAUSING = """
thread = threading.Thread(target=lambda: (forks.wait(), clear()))
thread.start()
child = os.fork()
if not child:
    signal.alarm(20)
    grandchild = os.fork()  # waits for threads that clear the cache
    os._exit(os.waitpid(grandchild, 0)[1] if grandchild else 0)
print(waited, os.waitpid(child, 0)[1])
thread.join()
"""

FORKING = """
import os, signal, threading
import polycast
from polycast.engine.choice import chosen

with polycast.autocast("cpu"):
    pass
torchs_cache = chosen()._extension
thread = threading.Thread(target=torchs_cache.acquire_for_fork, args=(True,))  # as a thread that is about to fork
thread.start()
thread.join()
child = os.fork()
if not child:
    signal.alarm(4)
    for _ in range(200):  # each would wait for 50 ms
        with polycast.autocast("cpu"):
            pass
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("clears", ["polycast.clear_autocast_cache()", "enter_and_leave()"])
def test_a_fork_waits_for_a_thread_that_clears_torchs_cache(run_program, engine, clears):
    cached = CACHED.replace("PAUSES:", "False:").replace("CLEARS", clears)
    assert run_program(cached + CLEARING, engine, imports="torch._dynamo") == (0, "0\n", "")


@pytest.mark.parametrize(
    ("engine", "clears"),
    [("native", "enter_and_leave()"), ("reference", "state.clear_torchs_cache()")],
)
def test_a_thread_that_another_librarys_fork_hook_waits_for_clears_torchs_cache(run_program, engine, clears):
    cached = CACHED.replace("PAUSES:", "True:").replace("CLEARS", clears)
    assert run_program(cached + PAUSING, engine, imports="torch._dynamo") == (0, "[True] 0\n", "")


def test_a_child_does_not_wait_for_threads_that_were_about_to_fork(run_program):
    assert run_program(FORKING, "native") == (0, "0\n", "")


LEAVING = """
def leave():
    with polycast.autocast("cpu"):
        entered.set()
        begun.wait(10)
        forks.set()  # the other thread goes on to sleep, without the GIL

entered = threading.Event()
other = threading.Thread(target=leave)
other.start()
entered.wait(10)
torch.clear_autocast_cache()
other.join()
print(begun.is_set())
"""


def test_a_region_is_left_without_the_gil_where_torch_clears_its_cache(run_program, engine):
    """torch clears it with its lock held, and runs Python then."""
    cached = CACHED.replace("PAUSES:", "False:").replace("CLEARS", "pass")
    assert run_program(cached + LEAVING, engine, imports="torch._dynamo") == (0, "True\n", "")
