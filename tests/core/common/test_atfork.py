"""A fork holds locks that other threads hold or nest, another fork does, and waits for imports, but not for long."""

import os

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")]

NESTED = """
import os, threading
from polycast.common.atfork import hold_during_fork

outer, inner = threading.Lock(), threading.RLock()
held, forks = threading.Event(), threading.Event()
locks = [outer, inner] if ORDER else [inner, outer]
for lock in locks:
    hold_during_fork(lambda lock=lock: [lock])


def nest():
    with outer:
        held.set()
        forks.wait()
        with inner:
            pass


thread = threading.Thread(target=nest)
thread.start()
held.wait()
os.register_at_fork(before=forks.set)
child = os.fork()
if not child:
    os._exit(not (outer.acquire(blocking=False) and inner.acquire(blocking=False)))
print(os.waitpid(child, 0)[1])
thread.join()
"""

TAKING_TURNS = """
import os, threading

program = os.getpid()
os.register_at_fork(before=lambda: pause())  # after the locks are taken
from polycast.common.atfork import hold_during_fork


class Lock:
    def acquire(self, blocking=True):
        if blocking:  # it is waited for, so it is released last
            is_awaited.set()
        return lock.acquire(blocking)

    def release(self):
        lock.release()
        if os.getpid() == program and threading.current_thread() is first and is_awaited.is_set():
            is_released.set()
            second_forks.wait(10)


def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    print(os.waitpid(child, 0)[1])


def pause():
    if threading.current_thread() is not first:
        second_forks.set()
        first.join()
        print(lock.locked(), flush=True)


lock = threading.Lock()
is_awaited, is_released, second_forks = threading.Event(), threading.Event(), threading.Event()
held, first = [Lock()], threading.Thread(target=fork)
hold_during_fork(lambda: held)
lock.acquire()
first.start()
is_awaited.wait()
lock.release()
is_released.wait()
fork()
print(lock.locked())
"""


@pytest.mark.parametrize("order", [True, False])
def test_a_fork_takes_locks_that_another_thread_nests_in_any_order(run_program, order):
    assert run_program(NESTED.replace("ORDER", str(order)), "reference") == (0, "0\n", "")


def test_threads_that_fork_in_turn_release_their_own_locks(run_program):
    assert run_program(TAKING_TURNS, "reference") == (0, "0\nTrue\n0\nFalse\n", "")


PROGRAM = """
import os, sys, threading
from polycast.common import importing
from polycast.policy.manifests import InstalledPlugin, Plugin

importing.LONGEST_WAIT = {limit}
sys.started, sys.ends = threading.Event(), threading.Event()
thread = threading.Thread(target=InstalledPlugin("acme", "acme", "1.0", Plugin()).resolve, args=("acme:number",))
thread.start()
assert sys.started.wait(60)
if {ends}:
    os.register_at_fork(before=sys.ends.set)  # before polycast's
child = os.fork()
if not child:
    os._exit(getattr(sys.modules["acme"], "number", 0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.ends.set()
thread.join()
"""


@pytest.mark.parametrize(("ends", "limit", "number"), [(True, 60, 5), (False, 0.1, 0)], ids=["ends", "hangs"])
def test_a_fork_waits_for_an_import_of_another_thread_that_ends(launch, tmp_path, ends, limit, number):
    (tmp_path / "acme.py").write_text("import sys\nsys.started.set()\nsys.ends.wait()\nnumber = 5\n")
    program = PROGRAM.format(ends=ends, limit=limit)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = launch(program, environment=environment)
    assert (done.stdout, done.stderr) == (f"{number}\n", "")
