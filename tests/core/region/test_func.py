"""torch.func, forward-mode derivatives, second derivatives and threads, in a region, compared with torch.autocast."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import polycast
from polycast import CastPolicy

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(name="layer")
def _layer():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def loss(parameters, layer, x):
    return functional_call(layer, parameters, (x,)).float().tanh().pow(2).sum()


def of_parameters(layer):
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


TRANSFORMS = {
    "functional_call": lambda layer: functional_call(layer, of_parameters(layer), (X,)),
    "grad": lambda layer: grad(loss)(of_parameters(layer), layer, X),
    "vmap": lambda layer: vmap(layer)(X),
    "vmap of grad": lambda layer: vmap(grad(loss), in_dims=(None, None, 0))(of_parameters(layer), layer, X),
    "vjp": lambda layer: vjp(layer, X)[1](torch.ones(3, 4, dtype=torch.bfloat16)),
    "jvp": lambda layer: jvp(layer, (X,), (torch.ones_like(X),)),
    "jacrev": lambda layer: jacrev(layer)(X[0]),
    "hessian": lambda layer: hessian(lambda x: layer(x).float().tanh().sum())(X[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_what_it_gives_in_torch_autocast(layer, name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = TRANSFORMS[name](layer)
    with polycast.autocast("cpu"):
        actual = TRANSFORMS[name](layer)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_region_in_a_transformed_function_applies(layer):
    @polycast.autocast("cpu")
    def function(x):
        return layer.weight @ x

    assert vmap(function)(X).dtype is torch.bfloat16
    assert grad(lambda x: function(x).float().sum())(X[0]).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_no_cast_outlives_a_transform(layer):
    """A cast that was kept would be a value of the transform, which is over when the next call would use it."""
    cache = polycast.WeightCache()
    with polycast.autocast("cpu", cache=cache):
        for _ in range(2):
            assert vmap(lambda x: layer.weight @ x)(X).dtype is torch.bfloat16
            grad(lambda x: (layer.weight @ x).float().sum())(X[0])
    assert cache.stats().entries == 0


def test_forward_mode(layer):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with polycast.autocast("cpu"):
            value, tangent = forward_ad.unpack_dual(layer(dual))
    expected = torch.ones(3, 4, dtype=torch.bfloat16) @ layer.weight.bfloat16().T
    assert (value.dtype, tangent.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("wrt", ["input", "weight"])
def test_second_derivatives_equal_those_of_torch_autocast(layer, wrt):
    def derivatives(region):
        x = X.clone().requires_grad_()
        leaf = x if wrt == "input" else layer.weight
        with region("cpu", dtype=torch.bfloat16):
            value = layer(x).float().tanh().sum()
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf)
        return first.detach(), second

    first, second = derivatives(polycast.autocast)
    assert second.abs().max() > 0
    torch.testing.assert_close((first, second), derivatives(torch.autocast), rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_threads_of_a_data_parallel_loop_run_in_the_captured_regions(layer):
    """As torch.nn.parallel.parallel_apply runs replicas: each in a thread of its own."""
    cache = polycast.WeightCache()
    with polycast.autocast("cpu", cache=cache, policy={"aten::tanh": CastPolicy.LOWER_PRECISION_FP}):
        replica = polycast.capture().wrap(lambda x: (layer(x), torch.tanh(x)))
        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(replica, X.chunk(3)))
        expected = layer(X)
    assert {y.dtype for pair in results for y in pair} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat([y for y, _ in results]), expected, rtol=0, atol=0)
    assert cache.stats().entries == 2
