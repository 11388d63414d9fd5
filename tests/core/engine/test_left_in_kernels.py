"""Regions that are entered and left while a kernel runs: by modes, backends and the garbage collector."""

import gc
import sys

import pytest
import torch
from tests.core.rounding import Rounded
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import polycast
from polycast import autocast

pytestmark = pytest.mark.usefixtures("engine")
X = torch.ones(4, 4)


class InKernel(TorchDispatchMode):
    """Calls a function in the kernel of `mm`."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.mm.default:
            self.function()
        return op(*args, **kwargs or {})


def run(function):
    """Call a function while a kernel runs."""
    with InKernel(function):
        torch.mm(X, X)


def entered(*args, **settings):
    region = autocast("cpu", *args, **settings)
    region.__enter__()
    return region


def leave(region):
    region.__exit__(None, None, None)


def state():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), polycast.autocast_nesting("cpu")


BEFORE = (False, torch.bfloat16, 0)


def test_a_region_that_is_left_in_a_kernel_is_off_afterwards():
    region = entered()
    run(lambda: leave(region))
    assert state() == BEFORE
    assert torch.mm(X, X).dtype is torch.float32


def test_autocast_is_off_in_the_kernel_whichever_region_is_left():
    region, found = entered(), []
    run(lambda: (leave(region), found.append(torch.is_autocast_enabled("cpu"))))
    assert found == [False]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nested_regions_are_left_in_any_order(order):
    regions = entered(), entered(torch.float16)
    run(lambda: leave(regions[order[0]]))
    assert state() == (True, (torch.float16, torch.bfloat16)[order[0] == 1], 1)
    leave(regions[order[1]])
    assert state() == BEFORE


def test_all_regions_are_left_in_a_kernel():
    regions = entered(), entered(torch.float16)
    run(lambda: [leave(each) for each in regions])
    assert state() == BEFORE


def test_a_region_in_a_disabled_one_is_left_in_a_kernel():
    outer = entered(enabled=False)
    inner = entered()
    run(lambda: leave(inner))
    assert state() == (False, torch.bfloat16, 1)
    leave(outer)
    assert state() == BEFORE


def test_a_region_that_a_kernel_leaves_open_restores_the_state_before_the_kernel():
    outer, opened = entered(), []
    run(lambda: opened.append(entered(torch.float16)))
    assert state() == (True, torch.float16, 2)
    leave(opened[0])
    assert state() == (True, torch.bfloat16, 1)
    leave(outer)
    assert state() == BEFORE


@pytest.mark.parametrize("first", ["outer", "opened"])
def test_a_kernel_may_leave_one_region_and_leave_another_open(first):
    outer, opened = entered(), []
    other = autocast("cpu", torch.float16, enabled=False)
    run(lambda: (opened.append(entered(torch.float16)), leave(outer), other.__enter__()))
    assert state() == (False, torch.float16, 2)
    if first == "opened":
        leave(opened[0])
        leave(other)
    else:
        leave(other)
        assert state() == (True, torch.float16, 1)
        leave(opened[0])
    assert state() == BEFORE


def test_a_region_is_left_in_a_kernel_within_a_kernel():
    outer, inner = entered(), []

    def nested():
        inner.append(entered())
        run(lambda: leave(outer))
        assert state() == (True, torch.bfloat16, 1)

    run(nested)
    assert state() == (True, torch.bfloat16, 1)
    leave(inner[0])
    assert state() == BEFORE


def test_regions_of_a_kernel_within_a_kernel_are_left_open():
    outer, opened = entered(), []

    def nested():
        with autocast("cpu"):
            run(lambda: opened.append(entered(torch.float16)))
            assert state() == (True, torch.float16, 3)

    run(nested)
    assert state() == (True, torch.float16, 2)
    leave(outer)
    assert state() == (True, torch.float16, 1)
    leave(opened[0])
    assert state() == BEFORE


@pytest.fixture
def other(hand_made):
    """Another device, which torch has a key for."""
    hand_made("mtia")
    return "mtia"


def test_a_region_of_another_device_is_left_in_a_kernel(other):
    region, of_other = entered(), autocast(other).__enter__()
    run(lambda: leave(of_other))
    assert (torch.is_autocast_enabled(other), *state()) == (False, True, torch.bfloat16, 1)
    leave(region)
    assert state() == BEFORE


def test_regions_of_two_devices_are_left_in_a_kernel_within_a_kernel(other):
    of_other, region = autocast(other).__enter__(), entered()

    def nested():
        with autocast("cpu"):
            run(lambda: (leave(of_other), leave(region)))

    run(nested)
    assert (torch.is_autocast_enabled(other), *state()) == (False, *BEFORE)


@pytest.fixture
def run_in_both(other, int8_kernels, monkeypatch):
    """Return a function that calls a function in a kernel of the other device in one of the CPU, and one after it."""
    kernel = int8_kernels["aten::linear"]
    compute = kernel.run

    def run_in_both(inner, after):
        def run_other(*args):
            with autocast(other), FakeTensorMode(), InKernel(inner):
                x = torch.empty(2, 2, device=other)
                torch.mm(x, x)
            after()
            return compute(*args)

        monkeypatch.setattr(kernel, "run", run_other)
        with torch.no_grad():
            torch.nn.functional.linear(X, torch.nn.Parameter(torch.ones(4, 4)))

    return run_in_both


def test_autocast_stays_off_in_a_kernel_around_the_one_in_which_a_region_is_left(run_in_both):
    regions, found = [entered(recipe=Rounded(min_size=1)) for _ in range(2)], []
    run_in_both(lambda: leave(regions[1]), lambda: found.append(torch.is_autocast_enabled("cpu")))
    assert found == [False]
    assert state() == (True, torch.bfloat16, 1)
    leave(regions[0])
    assert state() == BEFORE


def test_a_region_that_is_left_open_beneath_two_kernels_is_off_when_it_is_left(run_in_both):
    regions, opened, found = [entered(recipe=Rounded(min_size=1)) for _ in range(2)], [], []

    def after():
        found.append(torch.is_autocast_enabled("cpu"))
        leave(opened[0])
        found.append(torch.is_autocast_enabled("cpu"))

    run_in_both(lambda: (opened.append(entered()), leave(regions[1])), after)
    assert found == [True, False]
    assert state() == (True, torch.bfloat16, 1)
    leave(regions[0])
    assert state() == BEFORE


def test_a_region_of_a_kernel_is_left_in_a_kernel_within_it():
    outer, found = entered(), []

    def nested():
        inner = entered()
        run(lambda: leave(inner))
        found.append(torch.is_autocast_enabled("cpu"))

    run(nested)
    assert found == [False]
    assert state() == (True, torch.bfloat16, 1)
    leave(outer)
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
    with torch.no_grad(), pytest.raises(RuntimeError, match="'cpu' are in use: this thread runs one"):
        torch.nn.functional.linear(X, torch.nn.Parameter(torch.ones(4, 4)))
    assert state() == BEFORE


def test_an_op_is_computed_as_it_is_once_its_region_is_left(int8_kernels, monkeypatch):
    region, weight = entered(recipe=Rounded(min_size=1)), torch.nn.Parameter(torch.ones(4, 4))

    def leave_region(*args):
        leave(region)
        return "the region is left"

    monkeypatch.setattr(int8_kernels["aten::linear"], "unsupported_reason", leave_region)
    with torch.no_grad():
        assert torch.nn.functional.linear(X, weight).dtype is torch.float32
    assert state() == BEFORE
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(X, weight).requires_grad


def test_a_region_of_another_device_is_left_open_in_a_kernel(other):
    region, opened = entered(), []
    run(lambda: opened.append(autocast(other).__enter__()))
    assert (torch.is_autocast_enabled(other), *state()) == (True, True, torch.bfloat16, 1)
    leave(opened[0])
    assert (torch.is_autocast_enabled(other), *state()) == (False, True, torch.bfloat16, 1)
    leave(region)
    assert state() == BEFORE


def test_balanced_regions_in_a_kernel_change_nothing_around_it(other):
    def nested():
        with autocast(other), autocast("cpu", torch.float16):
            torch.mm(X, X)

    with autocast("cpu"), autocast(other):
        run(nested)
        assert (torch.is_autocast_enabled(other), *state()) == (True, True, torch.bfloat16, 1)
    with autocast("cpu"):
        run(nested)
        assert (torch.is_autocast_enabled(other), *state()) == (False, True, torch.bfloat16, 1)


def test_an_error_in_the_kernel_restores_the_state():
    region = entered()

    def fail():
        leave(region)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(fail)
    assert state() == BEFORE


def test_a_region_is_collected_in_a_kernel(int8_kernels):
    def generator():
        with autocast("cpu", recipe="rounded"):
            yield

    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(4, 64)
    with torch.no_grad(), autocast("cpu", recipe="rounded"):
        torch.nn.functional.linear(x, weight)
    suspended = generator()
    next(suspended)
    cycle = [suspended]
    cycle.append(cycle)
    gc.collect()
    gc.disable()
    del suspended, cycle

    def collect(frame, event, _):
        if event == "call" and frame.f_code.co_name == "perform":
            sys.setprofile(None)
            gc.collect()

    sys.setprofile(collect)
    try:
        with torch.no_grad():
            torch.nn.functional.linear(torch.ones(3, 64), weight)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert state() == BEFORE
