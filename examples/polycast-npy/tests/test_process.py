"""What holds for a process as a whole: the device gets its name when it is first asked for, and the end is clean."""

import subprocess
import sys

FRESH = """
import torch, polycast
before = torch._C._get_privateuse1_backend_name()
polycast.autocast("npy")
print(before, torch.ones(2, device="npy").device)
"""

# The interpreter is not to take the GIL from this thread by itself, so that autograd's waits for it until the end.
BACKWARD = """
import sys, torch, polycast_npy
sys.setswitchinterval(100)
polycast_npy.register_device()
(torch.ones(2, device="npy", requires_grad=True) * 2).sum().backward()
"""


def start(script):
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_region_makes_torch_know_the_device():
    printed, _ = start(FRESH).communicate()
    assert printed.split() == ["privateuseone", "npy:0"]


def test_a_process_that_ends_after_a_backward_ends_well():
    processes = [start(BACKWARD) for _ in range(3)]
    assert [(process.communicate()[0], process.returncode) for process in processes] == [("", 0)] * 3
