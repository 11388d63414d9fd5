"""Dispatch modes of the program, which see casts, and may write weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import polycast

from .cached_casts import X, parameter
from .each_cache import with_each_settings
from .wrapped import Wrapped

pytestmark = pytest.mark.usefixtures("engine")


class Casts(TorchDispatchMode):
    """Counts the casts that are made inside it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
@pytest.mark.parametrize("before", [0, 1], ids=["", "cast before"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_a_dispatch_mode_sees_the_casts_that_torch_makes(weight, grad, before):
    def count(autocast):
        with torch.set_grad_enabled(grad), autocast("cpu"):
            for _ in range(before):
                torch.mm(X, weight)
            with Casts() as casts:
                products = [torch.mm(X, weight) for _ in range(3)]
            products.append(torch.mm(X, weight))
        assert all(
            torch.equal(each, products[0]) and each.requires_grad == products[0].requires_grad for each in products
        )
        return casts.count

    found = [count(polycast.autocast), count(polycast.autocast)]
    if not before:  # a WeightCache holds the casts that are made outside of the mode
        found.append(count(lambda device: polycast.autocast(device, cache=polycast.WeightCache())))
    polycast.uninstall()
    assert set(found) == {count(torch.autocast)}


def test_a_dispatch_mode_sees_every_cast_of_a_view(cache):
    weight = parameter()
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        torch.mm(X, weight.T)
        with Casts() as casts:
            torch.mm(X, weight.T), torch.mm(X, weight.T)
    assert casts.count == 2


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
        with Casts() as casts, autocast("cpu"):
            (Linear.apply(X, weight) + torch.mm(X, weight)).sum().backward()
        return casts.count, weight.grad

    count, ours = gradient(polycast.autocast)
    polycast.uninstall()
    torchs_count, torchs = gradient(torch.autocast)
    assert count == torchs_count
    assert torch.equal(ours, torchs)


class Replaces(TorchDispatchMode):
    """Returns other tensors in place of casts."""

    def __init__(self, replace):
        super().__init__()
        self.replace = replace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return self.replace(result) if func is torch.ops.aten._to_copy.default else result


@pytest.mark.parametrize("replace", [Wrapped, torch.Tensor.float], ids=["a subclass", "float32"])
def test_what_a_mode_returns_in_place_of_a_cast_is_used_once(replace):
    weight = parameter()
    with torch.no_grad(), polycast.autocast("cpu"):
        with Replaces(replace):
            for _ in range(2):
                replaced = torch.mm(replace(X), weight)
                assert type(replaced) is (Wrapped if replace is Wrapped else torch.Tensor)
        assert torch.equal(torch.mm(X, weight), torch.mm(X, weight.detach().bfloat16()))


class Writes(TorchDispatchMode):
    """Writes in its handler of neg, where torch counts no versions."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.neg.default:
            self.write()
        return result


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
def test_a_write_in_the_handler_of_a_mode_is_seen(settings, thread):
    """torch's regions keep casts of weights that require grad, whatever is written, and no others."""
    for name, write in WRITES.items():
        check_write(name, write, settings(), thread)


def check_write(name, write, settings, thread):
    weight = parameter(requires_grad=False)
    mode = Writes(lambda: write(weight))

    def product():
        with polycast.autocast("cpu", **settings):
            return torch.mm(X, weight).float()

    with ThreadPoolExecutor(1) as other, torch.no_grad(), polycast.autocast("cpu"):
        call = (
            (lambda function: other.submit(torch.no_grad()(function)).result())
            if thread
            else (lambda function: function())
        )
        before = [product() for _ in range(3)][-1]
        call(mode.__enter__)
        again = product() if thread else before
        assert torch.equal(again, before)
        call(lambda: torch.neg(X))
        if thread:
            assert torch.allclose(product(), 2 * before), name
        call(lambda: mode.__exit__(None, None, None))
        assert torch.allclose(product(), 2 * before), name


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_mode_that_writes_nothing_drops_no_casts():
    weight, cache = parameter(), polycast.WeightCache()
    for mode in (FlopCounterMode(display=False), Writes(lambda: None)):
        for _ in range(2):
            with torch.no_grad(), polycast.autocast("cpu", cache=cache):
                torch.mm(X, weight)
            with mode:
                torch.neg(X)
                torch.ones(4).mul_(2)
    assert cache.stats().hits == 3
