"""Processes: the device is named when it is first used, and the process ends cleanly."""

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

WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")  # torch's, at its import
import torch, polycast
warnings.simplefilter("always")
status = polycast.backends()["npy"]
print(status.state, torch.device("npy"), polycast.is_autocast_available("npy"))
print(status.reason)
with polycast.autocast("npy"):
    print(torch.is_autocast_enabled("npy"))
"""


def start(script):
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_region_makes_torch_know_the_device():
    printed, _ = start(FRESH).communicate()
    assert printed.split() == ["privateuseone", "npy:0"]


def test_a_process_that_ends_after_a_backward_ends_well():
    processes = [start(BACKWARD) for _ in range(3)]
    assert [(process.communicate()[0], process.returncode) for process in processes] == [("", 0)] * 3


def test_without_numpy_the_device_is_unavailable_and_a_region_says_so():
    printed, _ = start(WITHOUT_NUMPY).communicate()
    assert "unavailable npy False\nNumPy cannot be imported: " in printed
    assert "AutocastDisabledWarning: " in printed
    assert printed.endswith("\nFalse\n")
