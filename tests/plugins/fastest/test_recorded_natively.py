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

CALLS = {
    "linear": (lambda x, w: F.linear(x, w), (48, 16), (8, 16)),
    "linear with a bias": (lambda x, w: F.linear(x, w, w[:, 0]), (3, 48, 16), (8, 16)),
    "linear of a view": (lambda x, w: F.linear(x, w.t()), (48, 8), (8, 16)),
    "mm": (lambda x, w: torch.mm(x, w), (48, 16), (16, 8)),
    "matmul of batches": (lambda x, w: torch.matmul(x, w), (3, 48, 16), (16, 8)),
    "mm of activations": (lambda x, w: torch.mm(x, (w * 2).t()), (48, 16), (8, 16)),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w), (48, 16), (16, 8)),
    "addmm of a column": (lambda x, w: torch.addmm(x[:, :1], x, w, beta=0.5, alpha=2), (48, 16), (16, 8)),
    "addmm of a matrix": (lambda x, w: torch.addmm(x[:, :8], x, w, alpha=-1.5), (48, 16), (16, 8)),
    "conv1d": (lambda x, w: F.conv1d(x, w, w[:, 0, 0], padding=1), (3, 8, 40), (6, 8, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (3, 8, 11, 9), (6, 8, 3, 2)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], 1, (1, 0), 2, 4), (3, 8, 11, 9), (8, 2, 3, 2)),
    "conv3d": (lambda x, w: F.conv3d(x, w, w[:, 0, 0, 0, 0]), (2, 4, 5, 6, 7), (6, 4, 3, 2, 1)),
}


def attention(x, w, mask=None, **options):
    """Return an attention of operands in the fast dtype."""
    x, w = (each.to(torch.get_autocast_dtype("cpu")) for each in (x, w))
    return F.scaled_dot_product_attention(x, x, w, mask, **options)


MASK = torch.arange(12) % 5 > torch.arange(12)[:, None] % 2 - 1
HEADS = (2, 3, 12, 8), (2, 3, 12, 8)
ATTENTIONS = {
    "attention": (attention, *HEADS),
    "causal attention": (lambda x, w: attention(x, w, is_causal=True, scale=0.3), *HEADS),
    "attention with a mask": (lambda x, w: attention(x, w, MASK * 0.7), *HEADS),
    "attention with a boolean mask": (lambda x, w: attention(x, w, MASK), *HEADS),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEEDED = {"both": (True, True), "activation": (True, False), "weight": (False, True)}


@pytest.fixture(params=CALLS | ATTENTIONS)
def call(request):
    """Return a function of an activation and a weight, and their shapes."""
    return (CALLS | ATTENTIONS)[request.param]


@pytest.fixture
def recipe(native, float32_way):
    return float32_way


def made(shapes, dtype=torch.float32, needed=(True, True)):
    torch.manual_seed(0)
    x = torch.randn(shapes[0]).to(dtype).requires_grad_(needed[0])
    return x, nn.Parameter(torch.randn(shapes[1]), requires_grad=needed[1])


def is_native(result):
    return "CppFunction" in type(result.grad_fn).__name__


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float16], ids=str)
def test_all_calls_have_the_bits_of_the_first(call, recipe, fast, given, needed):
    function, *shapes = call
    x, weight = made(shapes, DTYPES[given], NEEDED[needed])
    results = []
    for _ in range(3):
        with autocast("cpu", fast, recipe=recipe):
            results.append(function(x, weight))
    assert [result.dtype for result in results] == [fast] * 3
    assert [is_native(result) for result in results] == [False, True, True]
    gradient = torch.randn(results[0].shape).to(fast)
    inputs = [each for each in (x, weight) if each.requires_grad]
    expected, *others = [torch.autograd.grad(result, inputs, gradient) for result in results]
    for found in others:
        assert [each.dtype for each in found] == [each.dtype for each in inputs]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("backward", [Way.FAST, Way.FLOAT32])
@pytest.mark.parametrize("forward", [Way.FAST, Way.FLOAT32])
@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", ATTENTIONS.values(), ids=ATTENTIONS)
def test_an_attention_has_the_bits_of_torchs_kernels_in_each_way(call, recipe, fast, forward, backward, monkeypatch):
    monkeypatch.setattr(fastest_plan, "choose_recorded", lambda *_: Ways(forward, backward, backward, "for a test"))
    function, *shapes = call
    x, weight = made(shapes)
    results = []
    for _ in range(3):
        with autocast("cpu", fast, recipe=recipe):
            results.append(function(x, weight))
    is_torchs = forward is backward is Way.FAST
    assert [is_native(result) for result in results] == [False, not is_torchs, not is_torchs]
    with autocast("cpu", fast):
        torchs = function(x, weight)
    with autocast("cpu", fast, recipe=recipe), torch.no_grad():
        in_float32 = function(x, weight)
    if forward is backward or call is not ATTENTIONS["attention with a mask"]:  # which is rounded where a way is fast
        assert all(torch.equal(each, torchs if forward is Way.FAST else in_float32) for each in results)
    gradient = torch.randn(torchs.shape).to(fast)
    *found, of_torch = (torch.autograd.grad(each, (x, weight), gradient) for each in (*results, torchs))
    for others in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(others, found[0], strict=True))
    limits = torch.finfo(fast).eps
    for ours, theirs in zip(found[0], of_torch, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 2 * limits


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
def test_a_mask_is_rounded_alike_forward_and_backward(recipe, mask, forward, backward, in_inference_mode, monkeypatch):
    monkeypatch.setattr(fastest_plan, "choose_recorded", lambda *_: Ways(forward, backward, backward, "for a test"))
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
            result = attention(x, weight, given)
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
            seen.append([name_of(attention(x, weight).grad_fn) for _ in range(2)])
    assert seen[0] == seen[2]
    assert not any("FusedAttention" in name for name in seen[0])
    assert all("FusedAttention" in name for name in (*seen[1], *seen[3]))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)  # torch's fused attention has none
def test_second_derivatives_have_the_bits_of_the_first_call(call, recipe):
    function, *shapes = call
    x, weight = made(shapes)
    found = []
    for _ in range(2):
        with autocast("cpu", recipe=recipe):
            result = function(x, weight)
        first = torch.autograd.grad(result.float().pow(2).mean(), (x, weight), create_graph=True)
        found.append(torch.autograd.grad(sum(each.pow(2).sum() for each in first), (x, weight)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_backward_in_a_region_computes_in_float32(call, recipe):
    function, *shapes = call
    x, weight = made(shapes)
    found = []
    for region in (autocast("cpu", enabled=False), autocast("cpu"), autocast("cpu", torch.float16)):
        for _ in range(2):
            with autocast("cpu", recipe=recipe):
                result = function(x, weight)
        gradient = torch.ones_like(result)
        with region:
            found.append(torch.autograd.grad(result, (x, weight), gradient))
    for others in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], others, strict=True))


def test_a_second_backward_raises(recipe):
    x, weight = made([(48, 16), (8, 16)])
    with autocast("cpu", recipe=recipe):
        results = [F.linear(x, weight) for _ in range(2)]
    results[1].sum().backward()
    with pytest.raises(
        RuntimeError, match="backward through the graph a second time|after they have already been freed"
    ):
        results[1].sum().backward()


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
    for _ in range(2):
        with autocast("cpu", recipe=recipe):
            result = function(x, weight)
    loss = result.float().square().sum()
    expected = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        loss.backward()
    assert all(torch.equal(*pair) for pair in zip((x.grad, weight.grad), expected, strict=True))


@pytest.mark.slow
@torch._dynamo.config.patch(compiled_autograd=True)
@pytest.mark.parametrize("op", ["attention", "linear"])
def test_compiled_autograd_runs_the_backward_of_another_batch(recipe, op):
    @torch.compile(backend="aot_eager")
    def backward(loss):
        loss.backward()

    for batch in (2, 2, 3, 5):  # from the second size on, sizes are symbolic
        x, weight = made([(batch, 3, 12, 8)] * 2 if op == "attention" else [(batch, 64), (48, 64)])
        for _ in range(2):
            with autocast("cpu", recipe=recipe):
                result = attention(x, weight, MASK) if op == "attention" else F.linear(x, weight)
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
