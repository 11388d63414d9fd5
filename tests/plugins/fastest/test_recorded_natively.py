"""Products that autograd records in float32: after the first call by the native engine, with the same bits."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel

from polycast import autocast
from polycast.engine import installation
from polycast_plugins.fastest import attention as attention_module
from polycast_plugins.fastest import fastest_plan
from polycast_plugins.fastest.choose_way import Way
from polycast_plugins.fastest.recorded_ways import ALL_FAST, Ways

from .products import FUSED_ATTENTIONS, HEADS, PRODUCTS, equal, fused_attention, made

IN_PYTHON = ("matmul of batches", "matmul of activations", "bmm", "baddbmm", "conv2d padded")
CALLS = {name: call for name, call in (PRODUCTS | FUSED_ATTENTIONS).items() if name not in IN_PYTHON}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEEDED = {"both": (True, True), "activation": (True, False), "weight": (False, True)}


@pytest.fixture(params=CALLS)
def call(request):
    """Return a function of an activation and a weight, and their shapes."""
    return CALLS[request.param]


@pytest.fixture
def recipe(native, float32_way):
    return float32_way


def is_native(result):
    return "CppFunction" in type(result.grad_fn).__name__


def called_twice(function, x, weight, recipe):
    """Return the result of the second call, which is native."""
    for _ in range(2):
        with autocast("cpu", recipe=recipe):
            result = function(x, weight)
    return result


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float16], ids=str)
def test_all_calls_have_the_bits_of_the_first(call, recipe, fast, given, needed):
    function, *shapes = call
    x, weight = made(shapes, DTYPES[given], NEEDED[needed])
    with autocast("cpu", fast, recipe=recipe):
        results = [function(x, weight) for _ in range(3)]
        with torch.no_grad():
            used = function(x, weight)
    assert [result.dtype for result in results] == [fast] * 3
    assert [is_native(result) for result in results] == [False, True, True]
    assert equal(results, [used] * 3)
    gradient = torch.randn(results[0].shape).to(fast)
    inputs = [each for each in (x, weight) if each.requires_grad]
    expected, *others = [torch.autograd.grad(result, inputs, gradient) for result in results]
    for found in others:
        assert [each.dtype for each in found] == [each.dtype for each in inputs]
        assert equal(found, expected)


@pytest.mark.parametrize("backward", [Way.FAST, Way.FLOAT32])
@pytest.mark.parametrize("forward", [Way.FAST, Way.FLOAT32])
@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", FUSED_ATTENTIONS, indirect=True)
def test_an_attention_has_the_bits_of_torchs_kernels_in_each_way(call, recipe, fast, forward, backward, choose_ways):
    choose_ways((forward, backward, backward))
    function, *shapes = call
    x, weight = made(shapes)
    with autocast("cpu", fast, recipe=recipe):
        results = [function(x, weight) for _ in range(3)]
        with torch.no_grad():
            in_float32 = function(x, weight)
    is_torchs = forward is backward is Way.FAST
    assert [is_native(result) for result in results] == [False, not is_torchs, not is_torchs]
    with autocast("cpu", fast):
        torchs = function(x, weight)
    is_rounded = call is FUSED_ATTENTIONS["fused attention with a mask"]  # the mask, where a way is fast
    if forward is backward or not is_rounded:
        assert equal(results, [torchs if forward is Way.FAST else in_float32] * 3)
    gradient = torch.randn(torchs.shape).to(fast)
    first, *others, of_torch = (torch.autograd.grad(each, (x, weight), gradient) for each in (*results, torchs))
    assert all(equal(found, first) for found in others)
    for ours, theirs in zip(first, of_torch, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 2 * torch.finfo(fast).eps


MASKS = {
    "of large numbers": -10013 * (torch.arange(12) % 3 == 0)[:, None].expand(12, 12).float(),
    "of distances": -0.7 * (torch.arange(12)[:, None] + 400 - torch.arange(12)).abs(),
    "of -inf": torch.full((12, 12), -torch.inf).triu(1),
    "boolean": torch.ones(12, 12, dtype=torch.bool).tril(),
}


@pytest.mark.parametrize("backward", [Way.FAST, Way.FLOAT32])
@pytest.mark.parametrize("forward", [Way.FAST, Way.FLOAT32])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_a_mask_is_rounded_alike_forward_and_backward(recipe, mask, forward, backward, in_inference_mode, choose_ways):
    choose_ways((forward, backward, backward))
    x, weight = made(HEADS)
    with torch.inference_mode(in_inference_mode):
        given = mask.clone()
    gradient = torch.randn(HEADS[0]).bfloat16()

    def errors(region, is_rounded):
        """Return the errors of the gradients, which are large where the output, which is rounded, cancels."""
        added = mask.bfloat16() if is_rounded and mask.is_floating_point() else mask
        values = [each.detach().bfloat16().double().requires_grad_() for each in (x, weight)]
        exact = F.scaled_dot_product_attention(
            values[0], values[0], values[1], added if added.dtype is torch.bool else added.double()
        )
        with region:
            result = fused_attention(x, weight, given)
        found, expected = (
            torch.autograd.grad(each, operands, gradient.to(each.dtype))
            for each, operands in ((result, (x, weight)), (exact, values))
        )
        return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]

    torchs = errors(torch.autocast("cpu"), is_rounded=True)
    for _ in range(2):
        ours = errors(autocast("cpu", recipe=recipe), is_rounded=Way.FAST in (forward, backward))
        assert all(error <= 1.1 * of_torch + 1e-3 for error, of_torch in zip(ours, torchs, strict=True))


def name_of(node):
    """Return the name of a node; torch 2.11 has name() only for those in C++."""
    return type(node).__name__ if isinstance(node, BackwardCFunction) else node.name()


def test_what_is_decided_without_fused_kernels_does_not_stay(recipe, monkeypatch):
    ways = Ways(Way.FLOAT32, Way.FLOAT32, Way.FLOAT32, "for a test", is_float32=True)
    monkeypatch.setattr(fastest_plan, "choose_recorded", lambda *given: ALL_FAST if given[-1].is_recomputed else ways)
    x, weight = made(HEADS)
    seen = []
    for kernels in (sdpa_kernel(SDPBackend.MATH), nullcontext(), sdpa_kernel(SDPBackend.MATH), nullcontext()):
        with kernels, autocast("cpu", recipe=recipe):
            seen.append([name_of(fused_attention(x, weight).grad_fn) for _ in range(2)])
    assert seen[0] == seen[2]
    assert not any("FusedAttention" in name for name in seen[0])
    assert all("FusedAttention" in name for name in (*seen[1], *seen[3]))


@pytest.mark.parametrize("call", [name for name in CALLS if name not in FUSED_ATTENTIONS], indirect=True)
def test_second_derivatives_have_the_bits_of_the_first_call(call, recipe):
    function, *shapes = call
    x, weight = made(shapes)
    found = []
    for _ in range(2):
        with autocast("cpu", recipe=recipe):
            result = function(x, weight)
        first = torch.autograd.grad(result.float().pow(2).mean(), (x, weight), create_graph=True)
        found.append(torch.autograd.grad(sum(each.pow(2).sum() for each in first), (x, weight)))
    assert equal(*found)


def test_a_backward_in_a_region_computes_in_float32(call, recipe):
    function, *shapes = call
    x, weight = made(shapes)
    found = []
    for region in (autocast("cpu", enabled=False), autocast("cpu"), autocast("cpu", torch.float16)):
        result = called_twice(function, x, weight, recipe)
        gradient = torch.ones_like(result)
        with region:
            found.append(torch.autograd.grad(result, (x, weight), gradient))
    assert all(equal(others, found[0]) for others in found[1:])


def test_a_second_backward_raises(recipe):
    x, weight = made([(48, 16), (8, 16)])
    result = called_twice(F.linear, x, weight, recipe)
    result.sum().backward()
    with pytest.raises(RuntimeError, match="through the graph a second time|after they have already been freed"):
        result.sum().backward()


def test_saved_tensors_go_through_hooks(recipe):
    x, weight = made([(48, 16), (8, 16)])
    seen = []

    def pack(tensor):
        seen.append(tensor.dtype)
        return tensor.clone()

    with autocast("cpu", recipe=recipe):
        F.linear(x, weight)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = F.linear(x, weight)
    assert is_native(result)
    assert seen == [torch.bfloat16, torch.bfloat16]
    result.sum().backward()
    assert weight.grad.dtype is torch.float32


@pytest.mark.slow
def test_compiled_autograd_runs_the_backward(call, recipe):
    from torch._dynamo import compiled_autograd

    function, *shapes = call
    x, weight = made(shapes)
    result = called_twice(function, x, weight, recipe)
    loss = result.float().square().sum()
    expected = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        loss.backward()
    assert equal((x.grad, weight.grad), expected)


@pytest.mark.slow
@torch._dynamo.config.patch(compiled_autograd=True)
@pytest.mark.parametrize("name", ["fused attention with a boolean mask", "linear"])
def test_compiled_autograd_runs_the_backward_of_another_batch(recipe, name):
    @torch.compile(backend="aot_eager")
    def backward(loss):
        loss.backward()

    for batch in (2, 2, 3, 5):  # from the second size on, sizes are symbolic
        function, *shapes = CALLS[name]
        x, weight = made([(batch, *shape[1:]) for shape in shapes] if "attention" in name else [(batch, 16), (8, 16)])
        result = called_twice(function, x, weight, recipe)
        assert is_native(result)
        loss = result.float().square().sum()
        expected = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        backward(loss)
        torch.testing.assert_close((x.grad, weight.grad), expected)


def test_few_numbers_are_converted_to_the_bits_of_torchs_conversions(recipe):
    one = nn.Parameter(torch.ones(1, 1, 1, 1), requires_grad=False)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    floats = torch.arange(-(2**31), 2**31, 2**18 + 12345).to(torch.int32).view(torch.float32)
    for image in (
        *halves.reshape(-1, 1, 1, 64, 64),
        floats[:15600].reshape(2, 1, 78, 100),
        floats[:7].reshape(1, 1, 1, 7),
    ):
        expected = F.conv2d(image.float(), one).bfloat16()
        for _ in range(2):  # by Python, and natively
            with torch.no_grad(), autocast("cpu", recipe=recipe):
                found = F.conv2d(image, one)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_the_reference_engine_does_not_compile_ops_that_it_never_calls(monkeypatch, float32_way):
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "reference")
    compiled = []
    monkeypatch.setattr(attention_module, "load_ops", compiled.append)
    x, weight = made(((48, 16), (8, 16)))
    with autocast("cpu", recipe=float32_way):
        F.linear(x, weight).sum().backward()
    installation.forget_choice()
    assert (compiled, weight.grad.shape) == ([], weight.shape)
