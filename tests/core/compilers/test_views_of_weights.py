"""Views of weights in compiled code, from a cached cast of the whole weight.

As torch checks the first call of compiled code, it holds weights through ``.data``, and nothing is kept of them.
"""

import pytest
import torch
from tests.engines import NATIVE
from torch import nn
from torch.nn.functional import linear

import polycast
from polycast import autocast

pytestmark = NATIVE
SIZE = 64
X = torch.linspace(-1, 1, 2 * SIZE).reshape(2, SIZE)


def new_weight(*shape):
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(*(shape or (SIZE, SIZE)), generator=generator))


def compiled(function, backend="aot_eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


WHOLE = {
    "T": lambda w, x: (x @ w.T) @ w.T,
    "weight and view": lambda w, x: linear(x, w) @ w,
    "weight and transpose": lambda w, x: (x @ w) @ w.t(),
    "view of a view": lambda w, x: x @ w.view(2, 32, SIZE).view(SIZE, SIZE).mT,
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_views_of_all_of_a_weight_are_served_its_cast(backend, name, grad, cache):
    def run(region):
        torch._dynamo.reset()
        w, x = new_weight(), X.clone().requires_grad_()
        function = compiled(lambda x: WHOLE[name](w, x), backend)
        for _ in range(3):
            with torch.set_grad_enabled(grad), region():
                y = function(x)
        if grad:
            y.float().square().sum().backward()
        return y, w.grad, x.grad

    polycast.uninstall()
    wanted = run(lambda: torch.autocast("cpu"))
    actual = run(lambda: autocast("cpu", cache=cache))
    for ours, of_torch in zip(actual, wanted, strict=True):
        assert ours is of_torch is None or torch.equal(ours, of_torch)
    assert cache.stats().hits >= 1


def test_a_view_of_a_part_is_cast_by_the_code_as_without_a_cache(cache):
    w = new_weight()
    with torch.no_grad(), autocast("cpu", cache=cache):
        y = compiled(lambda x: linear(x, w[:32]))(X)
        assert torch.equal(y, linear(X.bfloat16(), w[:32].bfloat16()))
    assert cache.stats().entries == 0


@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w.T[:3].zero_()], ids=["base", "view"])
def test_writes_in_the_code_and_between_calls_are_seen(write, cache):
    w = new_weight()

    def function(x, writes):
        first = x @ w.T
        if writes:
            write(w)
        return first, x @ w.T

    with torch.no_grad(), autocast("cpu", cache=cache):
        call = compiled(function)
        for writes in (False, True, False, True):
            wanted = X.bfloat16() @ w.T.bfloat16()
            first, second = call(X, writes)
            assert torch.equal(first, wanted)
            assert torch.equal(second, X.bfloat16() @ w.T.bfloat16())
        write(w)
        assert torch.equal(call(X, False)[0], X.bfloat16() @ w.T.bfloat16())


def test_what_code_returns_of_a_cached_casts_view_is_its_own(cache):
    w = new_weight()
    with torch.library._scoped_library("polycast_test", "FRAGMENT") as library:
        library.define("same(Tensor(a) x) -> Tensor(a)")
        library.impl("same", lambda x: x.view(x.shape), "CompositeImplicitAutograd")
        register = polycast.register_op("polycast_test::same", "lower_precision_fp")
        with register, torch.no_grad(), autocast("cpu", cache=cache):
            call = compiled(lambda x: (torch.ops.polycast_test.same(w.T), x @ w.T))
            call(X)[0].zero_()
            assert torch.equal(call(X)[1], X.bfloat16() @ w.T.bfloat16())


def test_a_view_that_is_transposed_in_place_is_what_it_is_in_eager(cache):
    w = new_weight()
    call = compiled(lambda x: x @ w.view(SIZE, SIZE).t_())
    with torch.no_grad(), autocast("cpu", cache=cache):
        for _ in range(3):
            assert torch.equal(call(X), X.bfloat16() @ w.T.bfloat16())
