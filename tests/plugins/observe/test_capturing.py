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


SUB_AND_LOG = "['aten::log', 'aten::sub.Tensor']"
PRINTED = {
    # An error of the backend does not reach the program, nor does an exit; an interrupt does.
    "values are read only while no graph is captured": (
        REGISTER + ANSWERS,
        [f"aten::log {SUB_AND_LOG}", *[f"None {SUB_AND_LOG}"] * 3, "stopped"],
    ),
    "ops that a backend runs to answer are not observed": (REGISTER + ASKING_RUNS_OPS, [f"aten::log {SUB_AND_LOG}"]),
    "a backend that is registered while observed is asked": (REGISTERED_LATER, ["None"]),
    "the error of an observed op reaches the program": (REGISTER + RAISING, ["no mm here"] * 2),
    "values are not read where a kernel in Python raises": (REGISTER + MISSING, ["torch.float16", "['aten::mm'] 0"]),
}


@pytest.mark.parametrize(("script", "printed"), PRINTED.values(), ids=PRINTED)
def test_in_a_process_of_its_own(run_program, script, printed):
    pytest.importorskip("numpy")
    status, output, errors = run_program(BEGIN + script, "native", NPY)
    assert (status, output.splitlines(), errors) == (0, printed, "")
