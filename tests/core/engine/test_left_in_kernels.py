"""Regions that are entered and left while a kernel runs: by modes and backends."""

import pytest
import torch
from tests.core.rounding import Rounded
from torch._subclasses import FakeTensorMode

import polycast
from polycast import autocast

from .modes import AtOp

pytestmark = pytest.mark.usefixtures("engine")
MM = torch.ops.aten.mm.default
X, WEIGHT = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))


def run(function):
    """Call a function while a kernel runs."""
    with AtOp(MM, function):
        torch.mm(X, X)


def linear():
    with torch.no_grad():
        return torch.nn.functional.linear(X, WEIGHT)


def entered(*args, **settings):
    region = autocast("cpu", *args, **settings)
    region.__enter__()
    return region


def leave(region):
    region.__exit__(None, None, None)


def state():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), polycast.autocast_nesting("cpu")


BEFORE = (False, torch.bfloat16, 0)


@pytest.fixture
def other(hand_made):
    return hand_made("mtia").device_type


REGIONS = {
    "a": ("cpu", torch.bfloat16),
    "b": ("cpu", torch.bfloat16),
    "h": ("cpu", torch.float16),
    "o": ("cpu", torch.float16, False),
    "d": ("cpu", torch.bfloat16, False),
    "x": ("mtia", torch.bfloat16),
    "y": ("mtia", torch.bfloat16),
}
"""The regions of the programs: + enters one and - leaves it."""
PROGRAMS = {
    "one of one": "+a ( -a off )",
    "the outer of two": "+a +h ( -a off ) on h1 -h",
    "the inner of two": "+a +h ( -h off ) on b1 -a",
    "all": "+a +h ( -a -h )",
    "one in a disabled one": "+d +a ( -a ) off b1 -d",
    "none, and one is opened": "+a ( +h ) on h2 -h on b1 -a",
    "one, and others are opened": "+a ( +h -a +o ) off h2 -h -o",
    "one, and others are opened, and left in the other order": "+a ( +h -a +o ) off h2 -o on h1 -h",
    "the outer one in an inner kernel": "+a ( +b ( -a ) on b1 ) on b1 -b",
    "the kernel's in an inner kernel": "+a ( +b ( -b ) off ) on b1 -a",
    "none, and one is opened in an inner kernel": "+a ( +b ( +h ) on h3 -b ) on h2 -a on h1 -h",
    "one of another device": "+a +x ( -x ) xoff on b1 -a",
    "those of two devices in an inner kernel": "+x +a ( +b ( -x -a ) -b ) xoff",
    "none, and one of another device is opened": "+a ( +x ) xon on b1 -x xoff on b1 -a",
    "those that it has entered": "+a +y ( +x +h ( ) -h -x ) xon on b1 -y ( +x +h ( ) -h -x ) xoff on b1 -a",
}
"""Programs by what a kernel leaves in them: a kernel runs what is between ( and ), which may be another kernel.

"on" and "off" say whether autocast is, "xon" and "xoff" whether it is on the other device, and "h2" that the dtype is
float16, and two regions are open. At the end all is as it was.
"""


def play(words, regions):
    """Do what the words say, up to the end of the kernel that they are of."""
    for word in words:
        if word == "(":
            run(lambda: play(words, regions))
        elif word == ")":
            return
        elif word[0] == "+":
            regions[word[1]].__enter__()
        elif word[0] == "-":
            leave(regions[word[1]])
        elif word in ("on", "off", "xon", "xoff"):
            assert torch.is_autocast_enabled("mtia" if word[0] == "x" else "cpu") is word.endswith("on")
        else:
            assert state()[1:] == ({"b": torch.bfloat16, "h": torch.float16}[word[0]], int(word[1]))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_regions_that_a_kernel_leaves(other, program):
    play(iter(program.split()), {name: autocast(*given) for name, given in REGIONS.items()})
    assert (torch.is_autocast_enabled(other), *state()) == (False, *BEFORE)
    assert torch.mm(X, X).dtype is torch.float32


@pytest.fixture
def run_in_both(other, int8_kernels, monkeypatch):
    """Return a function that calls a function in a kernel of the other device in one of the CPU, and one after it."""
    kernel = int8_kernels["aten::linear"]
    compute = kernel.run

    def run_in_both(inner, after):
        def run_other(*args):
            with autocast(other), FakeTensorMode(), AtOp(MM, inner):
                x = torch.empty(2, 2, device=other)
                torch.mm(x, x)
            after()
            return compute(*args)

        monkeypatch.setattr(kernel, "run", run_other)
        linear()

    return run_in_both


@pytest.mark.parametrize("opens", [False, True], ids=["", "one is opened"])
def test_autocast_is_off_in_a_kernel_around_the_one_in_which_a_region_is_left(run_in_both, opens):
    regions, opened, found = [entered(recipe=Rounded(min_size=1)) for _ in range(2)], [], []

    def inner():
        if opens:
            opened.append(entered())
        leave(regions[1])

    def after():
        found.append(torch.is_autocast_enabled("cpu"))
        for region in opened:
            leave(region)
        found.append(torch.is_autocast_enabled("cpu"))

    run_in_both(inner, after)
    assert found == [opens, False]
    assert state() == (True, torch.bfloat16, 1)
    leave(regions[0])
    assert state() == BEFORE


def test_a_region_is_left_while_the_state_after_a_kernel_is_restored(engine, monkeypatch):
    if engine == "native":
        pytest.skip("no Python runs there")
    regions = entered(), entered(torch.float16)
    set_enabled = torch.set_autocast_enabled

    def leave_both(*args):
        monkeypatch.setattr(torch, "set_autocast_enabled", set_enabled)
        leave(regions[0])
        set_enabled(*args)

    run(lambda: (leave(regions[1]), monkeypatch.setattr(torch, "set_autocast_enabled", leave_both)))
    assert state() == BEFORE


def test_kernels_are_not_uninstalled_while_one_runs(int8_kernels, monkeypatch):
    region = entered(recipe=Rounded(min_size=1))

    def uninstall(*args):
        leave(region)
        polycast.uninstall()

    monkeypatch.setattr(int8_kernels["aten::linear"], "unsupported_reason", uninstall)
    with pytest.raises(RuntimeError, match="'cpu' are in use: this thread runs one"):
        linear()
    assert state() == BEFORE


def test_an_op_is_computed_as_it_is_once_its_region_is_left(int8_kernels, monkeypatch):
    region = entered(recipe=Rounded(min_size=1))

    def leave_region(*args):
        leave(region)
        return "the region is left"

    monkeypatch.setattr(int8_kernels["aten::linear"], "unsupported_reason", leave_region)
    assert linear().dtype is torch.float32
    assert state() == BEFORE
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(X, WEIGHT).requires_grad


def test_an_error_in_the_kernel_restores_the_state():
    region = entered()

    def fail():
        leave(region)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(fail)
    assert state() == BEFORE
