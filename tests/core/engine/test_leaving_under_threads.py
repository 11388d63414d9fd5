"""Leaving a region while another thread clears torch's cache of casts, which runs Python with torch's lock held."""

import subprocess
import sys

import pytest

PROGRAM = """
import threading, time, torch, polycast
from torch.utils._python_dispatch import TorchDispatchMode

holds_the_lock, leaves = threading.Event(), threading.Event()

class Freed:
    def __del__(self):
        holds_the_lock.set()
        leaves.wait(10)
        time.sleep(0.2)  # without the GIL: the other thread gets to the lock

class KeepOnCasts(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default:
            result.freed = Freed()
        return result

def leave():
    with polycast.autocast("cpu"):
        entered.set()
        holds_the_lock.wait(10)
        leaves.set()

entered = threading.Event()
other = threading.Thread(target=leave)
weight = torch.ones(2, 2, requires_grad=True)
with torch.autocast("cpu", torch.bfloat16):
    with KeepOnCasts():
        torch.mm(torch.ones(2, 2, dtype=torch.bfloat16), weight)  # torch's kernel, which keeps the cast
    other.start()
    entered.wait(10)
other.join()
print("held" if holds_the_lock.is_set() else "not held")
"""


@pytest.mark.slow
def test_a_region_is_left_without_the_gil_where_torch_clears_its_cache(engine):
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["held"], "")
