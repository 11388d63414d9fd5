"""Forks while threads observe, import plugins or compile their C++ leave the child usable."""

import os

import pytest
from tests.core.engine.test_forks import COMPILING, IMPORTING

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")]

MEETING = """
import os, threading
import polycast
import torch
from polycast_plugins.observe import module_calls


class Lock:
    def acquire(self, blocking=True):
        return lock.acquire(blocking)

    def release(self):
        lock.release()

    def __enter__(self):
        lock.acquire()
        held.set()
        forks.wait()

    def __exit__(self, *_):
        lock.release()


lock, held, forks = threading.RLock(), threading.Event(), threading.Event()
os.register_at_fork(before=forks.set)  # before the locks are taken
with polycast.observe(threads="all"):
    pass
module_calls.observations._lock = Lock()
observing = polycast.observe(torch.nn.ReLU())
thread = threading.Thread(target=observing.__enter__)
thread.start()
held.wait()
child = os.fork()
if not child:
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""


def test_observing_and_forking_on_two_threads_do_not_deadlock(run_program):
    assert run_program(MEETING, "native") == (0, "0\n", "")


@pytest.mark.parametrize("what", ["observer", "ops"])
def test_a_fork_does_not_wait_for_a_compiler(run_program, tmp_path, what):
    assert run_program(COMPILING, "native", tmp_path, what)[1] == "0\n[True]\n"


@pytest.mark.parametrize(
    "module",
    [
        "polycast_plugins.quantize.cpu.few_rows",
        "polycast_plugins.quantize.cpu.int4",
        "polycast_plugins.quantize.cpu.int8",
        "polycast_plugins.fastest.measure",
    ],
)
def test_a_child_imports_what_another_thread_was_importing(run_program, module):
    assert run_program(IMPORTING, "native", module, timeout=60)[1] == "0\n"
