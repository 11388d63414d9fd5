"""Devices whose kernels and backend are in Python: what they raise, and run, while values are read."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NPY = Path(__file__).parents[3] / "examples/polycast-npy/src"
BEGIN = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import torch, polycast, polycast_npy

class Capturing(polycast_npy.NpyBackend):
    def is_capturing(self):
        return answer()

def observed():
    with polycast.observe(nonfinite="record") as seen, torch.no_grad():
        (x - x).log()
    return seen.nonfinite and seen.nonfinite.op, sorted(op.op for op in seen.ops)

def fail(error):
    raise error

polycast_npy.register_device()
x = torch.ones(4).to("npy")
"""
REGISTER = "polycast.plugin.register_backend(Capturing())\n"
ANSWERS = """
for answer in (lambda: False, lambda: True, lambda: fail(ValueError), lambda: fail(SystemExit)):
    print(*observed())
answer = lambda: fail(KeyboardInterrupt)
try:
    observed()
except KeyboardInterrupt:
    print("stopped")
"""
ASKING_RUNS_OPS = """
def answer():
    return bool((x + torch.ones(4).to("npy")).cpu().isnan().any())

print(*observed())
"""
REGISTERED_LATER = """
answer = lambda: True
with polycast.observe(nonfinite="record") as seen, torch.no_grad():
    polycast.plugin.register_backend(Capturing())
    (x - x).log()
print(seen.nonfinite)
"""
MISSING = """
answer = lambda: False
def no_abs(*args):
    raise NotImplementedError("no abs here")

library = torch.library.Library("aten", "IMPL")
library.impl("abs", no_abs, "PrivateUse1", allow_override=True)
library.impl("isfinite", no_abs, "PrivateUse1", allow_override=True)
m = torch.ones(2, 2).to("npy")
with torch.no_grad(), polycast.observe(numerics=True, nonfinite="record") as seen, polycast.autocast("npy"):
    print(torch.mm(m, m).dtype)
print(sorted(op.op for op in seen.ops), len(seen.numerics))
"""
RAISING = """
def fail_in_mm(*args):
    raise ValueError("no mm here")

answer = lambda: False
library = torch.library.Library("aten", "IMPL")
library.impl("mm", fail_in_mm, "PrivateUse1", allow_override=True)
m = torch.ones(2, 2).to("npy")
for _ in range(2):
    try:
        with torch.no_grad(), polycast.observe(numerics=True) as seen, polycast.autocast("npy"):
            torch.mm(m, m)
    except ValueError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def lines(run_program):
    """Return a function that returns what a script prints in a process of its own, on the native engine."""
    pytest.importorskip("numpy")

    def lines(script):
        status, printed, errors = run_program(BEGIN + script, "native", NPY)
        assert (status, errors) == (0, "")
        return printed.splitlines()

    return lines


def test_values_are_read_only_while_no_graph_is_captured(lines):
    """An error of the backend does not reach the program, nor does an exit; an interrupt does."""
    ops = "['aten::log', 'aten::sub.Tensor']"
    assert lines(REGISTER + ANSWERS) == [f"aten::log {ops}", *[f"None {ops}"] * 3, "stopped"]


def test_ops_that_a_backend_runs_to_answer_are_not_observed(lines):
    assert lines(REGISTER + ASKING_RUNS_OPS) == ["aten::log ['aten::log', 'aten::sub.Tensor']"]


def test_a_backend_that_is_registered_while_observed_is_asked(lines):
    assert lines(REGISTERED_LATER) == ["None"]


def test_the_error_of_an_observed_op_reaches_the_program(lines):
    assert lines(REGISTER + RAISING) == ["no mm here"] * 2


def test_values_are_not_read_where_a_kernel_in_python_raises(lines):
    assert lines(REGISTER + MISSING) == ["torch.float16", "['aten::mm'] 0"]
