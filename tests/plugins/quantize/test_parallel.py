"""Loops on torch's threads start torch's full team, and give the same result on any team."""

import os
import subprocess
import sys

import pytest
import torch

import polycast

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
TASKS = "/proc/self/task"
TEAM = 4


def cast():
    """Cast a weight that is worth two threads, for an op that starts torch's team or none."""
    weight = torch.nn.Parameter(torch.ones(256, 256), requires_grad=False)
    with torch.no_grad(), polycast.autocast("cpu"):
        assert torch.ops.polycast_test.double(weight).dtype is torch.bfloat16


def linear():
    """Multiply a row by an int8 weight that is worth two threads, which prepacking it is too."""
    weight = torch.nn.Parameter(torch.ones(128, 1024), requires_grad=False)
    with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8()):
        torch.nn.functional.linear(torch.ones(1, 1024), weight)


def convolution():
    """Convolve an image whose loops are worth two or three threads."""
    weight = torch.nn.Parameter(torch.ones(64, 64, 3, 3), requires_grad=False)
    with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8("tensor", ops=("conv2d",))):
        torch.nn.functional.conv2d(torch.ones(1, 64, 48, 48), weight)


needs_int8 = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")
LOOPS = [cast, pytest.param(linear, marks=needs_int8), pytest.param(convolution, marks=needs_int8)]


@pytest.fixture
def double(define, registered):
    define("double(Tensor x) -> Tensor")
    registered("polycast_test::double", polycast.CastPolicy.LOWER_PRECISION_FP)


@pytest.fixture
def team_of_four():
    torch.set_num_threads(TEAM)


def torchs_team():
    """Return the ids of all threads, once torch has run a loop on its full team."""
    torch.zeros(1 << 18).add_(1)
    return set(os.listdir(TASKS))


@pytest.mark.skipif(not os.path.isdir(TASKS), reason="this platform does not list a process's threads")
@pytest.mark.usefixtures("team_of_four", "double")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_with_little_to_do_ends_none_of_torchs_threads(loop, in_thread):
    def lost():
        loop()  # builds, loads and packs what is needed, which may start threads of its own
        team = torchs_team()
        loop()
        return team - torchs_team()

    assert in_thread(lost) == set()


SMALLER_TEAM = """
import torch
import polycast

torch.set_num_threads(4)
weight = torch.nn.Parameter(torch.randn(300, 1000), requires_grad=False)
library = torch.library.Library("polycast_test", "FRAGMENT")
library.define("copy(Tensor x) -> Tensor")
library.impl("copy", lambda x: x.clone(), "CompositeExplicitAutograd")
with polycast.register_op("polycast_test::copy", polycast.CastPolicy.LOWER_PRECISION_FP):
    with torch.no_grad(), polycast.autocast("cpu"):
        cast = torch.ops.polycast_test.copy(weight)
print(torch.get_num_threads(), torch.equal(cast, weight.detach().bfloat16()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_team_that_is_smaller_than_torchs_number_of_threads_does_all_the_work(limit):
    environment = {**os.environ, "OMP_THREAD_LIMIT": str(limit), "POLYCAST_ENGINE": "native"}
    done = subprocess.run([sys.executable, "-c", SMALLER_TEAM], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("4 True\n", "")
