"""Devices whose backend says whether they capture a graph: while they do, values are not read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NPY = Path(__file__).parents[2] / "examples" / "polycast-npy" / "src"
SCRIPT = """
import torch, polycast, polycast_npy

class Capturing(polycast_npy.NpyBackend):
    def is_capturing(self):
        return answer()

def observed():
    with polycast.observe(nonfinite="record") as seen, torch.no_grad():
        (x - x).log()
    return seen.nonfinite and seen.nonfinite.op, "aten::log" in {op.op for op in seen.ops}

def fail():
    raise ValueError

def stop():
    raise KeyboardInterrupt

polycast_npy.register_device()
polycast.register_backend(Capturing())
x = torch.ones(4).to("npy")
for answer in (lambda: False, lambda: True, fail):
    print(*observed())
answer = stop
try:
    observed()
except KeyboardInterrupt:
    print("stopped")
"""


def test_values_are_read_only_while_no_graph_is_captured():
    """An error of the backend does not reach the program; one of a signal handler does."""
    pytest.importorskip("numpy")
    path = os.pathsep.join([str(NPY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path, "POLYCAST_ENGINE": "native"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == ["aten::log True", "None True", "None True", "stopped"], done.stderr
