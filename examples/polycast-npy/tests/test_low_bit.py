"""Products in int8 by a recipe: near float32's, of what is unusual too, and on a weight that is packed once."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast_npy.low_bit import Product

RECIPE = polycast.Int8(min_size=0)
INF, NAN = torch.inf, torch.nan


def product(scales, op, *args):
    """Call a kernel as polycast does, on tensors of the CPU."""
    kernel = Product(scales).kernels()[f"aten::{op}"]
    args = [arg.to("npy") if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert kernel.unsupported_reason(*args) is None
    return kernel.run(kernel.prepack(args[kernel.weight]), *args).cpu()


def observed(engine):
    """Return an observer, which needs the native engine."""
    return polycast.observe() if engine == "native" else contextlib.nullcontext()


@pytest.fixture(params=["row", "tensor"])
def scales(request):
    return request.param


def test_the_backend_offers_int8_and_says_why_not_of_others():
    backend = polycast.plugin.get_backend("npy")
    assert backend.recipe_availability(polycast.Int8("tensor"))
    answer = backend.recipe_availability(polycast.Float8())
    assert (answer.available, answer.reason) == (False, "there are no kernels for float8 on npy")
    ops = ["aten::addmm", "aten::linear", "aten::matmul", "aten::mm"]
    assert sorted(backend.low_bit_kernels(polycast.Int8())) == ops


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_recipes_with_other_settings_do_not_share_prepacked_weights(engine):
    layer, x, cache = torch.nn.Linear(64, 32).to("npy"), torch.randn(5, 64).to("npy"), polycast.WeightCache()
    with torch.no_grad():
        for recipe in (RECIPE, polycast.Int8("tensor", min_size=0), polycast.Int8(min_size=1)):
            with polycast.autocast("npy", recipe=recipe, cache=cache):
                layer(x)
    assert (cache.stats().packings, cache.stats().misses) == (2, 2)


def test_a_region_with_the_recipe_runs_the_kernels(engine):
    layer = torch.nn.Linear(64, 32).to("npy")
    x = torch.randn(5, 64).to("npy")
    with torch.no_grad():
        expected = layer(x).cpu()
        with observed(engine) as seen, polycast.autocast("npy", recipe=RECIPE):
            actual = layer(x)
        with polycast.autocast("npy"):
            plain = layer(x).cpu()
    if seen is not None:
        assert [(each.op, each.declined, each.calls) for each in seen.low_bit] == [("aten::linear", "", 1)]
    assert actual.dtype is torch.float16
    assert not torch.equal(actual.cpu(), plain)
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_weight_is_packed_once_and_again_when_it_changes(engine):
    cache = polycast.WeightCache()
    layer = torch.nn.Linear(64, 32, bias=False).to("npy")
    x = torch.randn(5, 64).to("npy")
    found = []
    with torch.no_grad():
        for use in range(3):
            if use == 2:
                layer.weight.mul_(2)
            with polycast.autocast("npy", recipe=RECIPE, cache=cache):
                found.append(layer(x).cpu().float())
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], 2 * found[0])
    assert (cache.stats().misses, cache.stats().hits) == (2, 1)
    assert (cache.stats().packings, cache.stats().packed_bytes) == (1, 64 * 32 + 4 * 32)


def test_where_gradients_are_recorded_the_op_runs_in_float16(engine):
    layer = torch.nn.Linear(64, 32).to("npy")
    x = torch.randn(5, 64).to("npy")
    with observed(engine) as seen, polycast.autocast("npy", recipe=RECIPE):
        layer(x).sum().backward()
    if seen is not None:
        assert [each.declined for each in seen.low_bit] == [
            "autograd records it, and quantized kernels have no backward"
        ]
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("shape", [(130,), (5, 130), (2, 3, 130), (0, 130)], ids=str)
def test_linear_takes_any_number_of_dimensions(scales, shape):
    x, weight, bias = torch.randn(shape), torch.randn(70, 130), torch.randn(70)
    actual = product(scales, "linear", x, weight, bias)
    torch.testing.assert_close(actual.float(), F.linear(x, weight, bias), rtol=0.05, atol=0.5)


@pytest.mark.parametrize("rows", [1, 5])
def test_mm_takes_its_weight_the_other_way_round(scales, rows):
    x, weight = torch.randn(rows, 130), torch.randn(130, 70)
    assert torch.equal(product(scales, "mm", x, weight), product(scales, "linear", x, weight.t(), None))


@pytest.mark.parametrize("added", [(70,), (5, 1), (1,)], ids=str)
def test_addmm_scales_what_it_adds_and_what_it_adds_to(scales, added):
    bias, x, weight = torch.randn(added), torch.randn(5, 130), torch.randn(130, 70)
    actual = product(scales, "addmm", bias, x, weight, 2, -0.5)
    expected = torch.addmm(bias, x, weight, beta=2, alpha=-0.5)
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.5)


def test_values_that_are_bytes_are_exact(scales):
    x, weight = torch.randint(-127, 128, (5, 64)).float(), torch.randint(-127, 128, (32, 64)).float()
    x[:, 0], weight[:, 0] = 127, 127
    actual = product(scales, "linear", x / 128, weight / 128, None)
    torch.testing.assert_close(actual, (x @ weight.t() / 128**2).half(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("values", [(INF,), (-INF,), (INF, -INF), (NAN,)], ids=str)
def test_a_row_with_inf_or_nan_is_what_it_is_in_float32_and_the_others_are_what_they_are_without(scales, values):
    x, weight = torch.randn(4, 16), torch.randn(8, 16).sign()
    clean = x.clone()
    clean[2], x[2, : len(values)] = 0, torch.tensor(values)
    actual = product(scales, "linear", x, weight, None)
    torch.testing.assert_close(actual[2].float(), F.linear(x, weight)[2], equal_nan=True)
    others = [0, 1, 3]
    assert torch.equal(actual[others], product(scales, "linear", clean, weight, None)[others])


def test_rows_of_zeros_give_the_bias(scales):
    bias = torch.randn(8).half()
    assert torch.equal(product(scales, "linear", torch.zeros(3, 16), torch.randn(8, 16), bias), bias.expand(3, 8))


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_weight_with_inf_or_nan_is_not_packed(value):
    weight = torch.randn(8, 16)
    weight[3, 3] = value
    assert Product("row").prepack(weight.to("npy")) is None
