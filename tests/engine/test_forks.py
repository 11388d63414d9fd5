"""What a child finds that is forked while threads hold locks."""

import os
import subprocess
import sys

import pytest

HELD = """
import os, sys, threading
import polycast

for name in polycast.__all__:
    getattr(polycast, name)
with polycast.observe(), polycast.autocast("cpu"):
    pass
KINDS = type(threading.Lock()), type(threading.RLock())


def locks():
    modules = [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "polycast"]
    return {f"{m.__name__}.{name}": v for m in modules for name, v in vars(m).items() if isinstance(v, KINDS)}


def hold(lock):
    with lock:
        began.set()
        forks.wait()


began, forks, taken = threading.Event(), threading.Event(), []
os.register_at_fork(before=forks.set)  # the last that is registered is the first that is called
for name, lock in locks().items():
    thread = threading.Thread(target=hold, args=(lock,))
    thread.start()
    began.wait()
    child = os.fork()
    if not child:
        os._exit(0 if locks()[name].acquire(blocking=False) else 1)
    if os.waitpid(child, 0)[1]:
        taken.append(name)
    thread.join()
    began.clear()
    forks.clear()
print(len(locks()) > 5, taken)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_no_lock_of_a_module_is_held_in_a_child_by_a_thread_that_is_not_there(engine):
    done = subprocess.run(
        # Python warns of forks among threads, which is what is tested.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HELD],
        env={**os.environ, "POLYCAST_ENGINE": engine},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("True []\n", "")
