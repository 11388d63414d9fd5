"""Dispatch modes of the program, which see casts, and may write weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polycast

from .cached_casts import X, parameter, use
from .each_cache import with_each_settings
from .modes import CAST, AtOp
from .wrapped import Wrapped

pytestmark = pytest.mark.usefixtures("engine")
NEG = torch.ops.aten.neg.default


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
@pytest.mark.parametrize("before", [0, 1], ids=["", "cast before"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_a_dispatch_mode_sees_the_casts_that_torch_makes(weight, grad, before):
    def count(autocast):
        with torch.set_grad_enabled(grad), autocast("cpu"):
            for _ in range(before):
                torch.mm(X, weight)
            with AtOp(CAST) as casts:
                products = [torch.mm(X, weight) for _ in range(3)]
            products.append(torch.mm(X, weight))
        assert all(torch.equal(each, products[0]) for each in products)
        assert len({each.requires_grad for each in products}) == 1
        return casts.calls

    found = [count(polycast.autocast), count(polycast.autocast)]
    if not before:  # a WeightCache holds the casts that are made outside of the mode
        found.append(count(lambda device: polycast.autocast(device, cache=polycast.WeightCache())))
    polycast.uninstall()
    assert set(found) == {count(torch.autocast)}


def test_a_dispatch_mode_sees_every_cast_of_a_view(cache):
    weight = parameter()
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        torch.mm(X, weight.T)
        with AtOp(CAST) as casts:
            torch.mm(X, weight.T), torch.mm(X, weight.T)
    assert casts.calls == 2


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_the_gradients_of_a_cast_that_a_mode_sees_are_torchs():
    """The backward runs in a region in the mode, and uses the cast of the forward."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.nn.functional.linear(x, weight)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            with Linear.autocast("cpu"):
                return torch.mm(gradient, weight), torch.mm(x.t(), gradient).t()

    def gradient(autocast):
        weight, Linear.autocast = parameter(2.0), staticmethod(autocast)
        with AtOp(CAST) as casts, autocast("cpu"):
            (Linear.apply(X, weight) + torch.mm(X, weight)).sum().backward()
        return casts.calls, weight.grad.tolist()

    ours = gradient(polycast.autocast)
    polycast.uninstall()
    assert ours == gradient(torch.autocast)


@pytest.mark.parametrize("replace", [Wrapped, torch.Tensor.float], ids=["a subclass", "float32"])
def test_what_a_mode_returns_in_place_of_a_cast_is_used_once(replace):
    weight = parameter()
    with torch.no_grad(), polycast.autocast("cpu"):
        with AtOp(CAST, replace=replace):
            for _ in range(2):
                replaced = torch.mm(replace(X), weight)
                assert type(replaced) is (Wrapped if replace is Wrapped else torch.Tensor)
        assert torch.equal(torch.mm(X, weight), torch.mm(X, weight.detach().bfloat16()))


WRITES = {
    "in place": lambda weight: weight.mul_(2),
    "out=": lambda weight: torch.mul(weight.detach(), 2, out=weight.detach()),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2),
    "a view": lambda weight: weight.detach().view(-1).mul_(2),
    "data": lambda weight: weight.data.mul_(2),
}


@pytest.mark.usefixtures("int8_kernels")
@pytest.mark.parametrize("thread", [False, True], ids=["", "on another thread"])
@with_each_settings
def test_a_write_in_the_handler_of_a_mode_is_seen(settings, thread, subtests):
    """torch counts no versions there; its regions keep only casts of weights that require grad, whatever is written."""
    for name, write in WRITES.items():
        with subtests.test(name):
            check_write(write, settings(), thread)


def check_write(write, settings, thread):
    weight = parameter(requires_grad=False)
    mode = AtOp(NEG, lambda: write(weight))

    def product():
        with polycast.autocast("cpu", **settings):
            return torch.mm(X, weight).float()

    def call(function):
        return other.submit(torch.no_grad()(function)).result() if thread else function()

    with ThreadPoolExecutor(1) as other, torch.no_grad(), polycast.autocast("cpu"):
        before = [product() for _ in range(3)][-1]
        call(mode.__enter__)
        assert not thread or torch.equal(product(), before)
        call(lambda: torch.neg(X))
        assert not thread or torch.allclose(product(), 2 * before)
        call(lambda: mode.__exit__(None, None, None))
        assert torch.allclose(product(), 2 * before)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_mode_that_writes_nothing_drops_no_casts(cache):
    weight = parameter()
    for mode in (FlopCounterMode(display=False), AtOp(NEG)):
        for _ in range(2):
            with torch.no_grad():
                use(cache, weight)
            with mode:
                torch.neg(X)
                torch.ones(4).mul_(2)
    assert cache.stats().hits == 3
