"""The operator ``polycast::cached_cast``, and casts that are written: an op may return its input, a cached cast.

tests/core/compilers/test_cached_casts.py tests the operator in compiled code.
"""

import re

import pytest
import torch

import polycast
from polycast.engine.kernels import autocast_key

from .cached_casts import X, parameter


@pytest.mark.usefixtures("engine")
def test_each_device_has_a_kernel_at_its_key_and_at_its_autograd_key(subtests):
    """No tensor with a gradient can be made on an absent device, so the dispatch table is read."""
    for device in ["cpu", "cuda", "maia", "mps", "mtia", "xpu"]:
        with subtests.test(device=device):
            polycast.uninstall()
            polycast.install(device)
            table = torch._C._dispatch_dump_table("polycast::cached_cast")
            key = autocast_key(device).removeprefix("Autocast")
            assert re.search(rf"^{key}: .*\[(default backend )?kernel\]$", table, re.MULTILINE)
            assert re.search(rf"^Autograd{key}: .*\[(autograd )?kernel\]$", table, re.MULTILINE)


def test_it_has_the_history_of_a_cast_without_installed_kernels():
    weight = torch.ones(2, 2, requires_grad=True)
    cast = torch.ops.polycast.cached_cast(weight, torch.bfloat16)
    assert cast.dtype is torch.bfloat16
    cast.sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 2))


@pytest.fixture
def region(engine, any_cache):
    """Return a region in which an op returns the cast of its input."""
    return polycast.autocast("cpu", cache=any_cache, policy={"aten::alias": "lower_precision_fp"})


@pytest.mark.parametrize("take", [lambda weight: weight, torch.t], ids=["weight", "view"])
def test_a_cast_that_was_written_is_not_used_again(region, weight, take):
    with region:
        for _ in range(3):
            with torch.no_grad():
                torch.ops.aten.alias(take(weight)).zero_()
            assert torch.mm(X, take(weight))[0, 0] == 4


def test_a_cast_that_was_written_through_the_one_in_the_graph_is_not_used_again(region):
    weight = parameter()
    with region:
        for _ in range(3):
            cast = torch.ops.aten.alias(weight)
            assert cast.requires_grad
            cast.mul_(0)
            assert torch.mm(X, weight)[0, 0] == 4
            with torch.no_grad():
                assert torch.mm(X, weight)[0, 0] == 4


def test_a_cast_that_was_written_is_not_used_by_other_threads(region, in_thread):
    weight = parameter()

    def product():
        with region:
            torch.mm(X, weight)
            return torch.mm(X, weight)[0, 0].item()

    with region:
        torch.mm(X, weight)
        assert in_thread(product) == 4
        torch.ops.aten.alias(weight).mul_(0)
        assert in_thread(product) == 4


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_backward_refuses_a_cast_that_was_written_since(region):
    weight = parameter()
    with region:
        out = torch.mm(X.clone().requires_grad_(), weight)
        with torch.no_grad():
            torch.ops.aten.alias(weight).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
