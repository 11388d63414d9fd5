"""Forks while a thread clears torch's own cache of casts."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CLEARING = """
import os, signal, threading, time
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import polycast


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
    if CLEAR:
        polycast.clear_autocast_cache()
    else:
        with polycast.autocast("cpu"):
            pass


begun, forks = threading.Event(), threading.Event()
weight = torch.nn.Parameter(torch.ones(2, 2))
torch.set_autocast_enabled("cpu", True)
with Marks():
    torch.mm(torch.ones(2, 2), weight)  # by torch's kernel
torch.set_autocast_enabled("cpu", False)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "at the end of a region"])
def test_a_fork_waits_for_a_thread_that_clears_torchs_cache(engine, by_hand):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", CLEARING.replace("CLEAR:", f"{by_hand}:")],
        env={**os.environ, "POLYCAST_ENGINE": engine},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "0\n", done.stderr
