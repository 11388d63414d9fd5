"""The recipe "fastest" on the fused ops of torch's attention and recurrent modules, which have several results."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from polycast import Fastest, autocast
from polycast_plugins.fastest import fastest_plan
from polycast_plugins.fastest.fastest_plan import onednn_supports
from polycast_plugins.fastest.measurement import Omission

pytestmark = pytest.mark.usefixtures("engine")
needs_fast_lstm = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not onednn_supports(torch.bfloat16),
    reason="regions compute LSTMs in float32 here: oneDNN has none in bfloat16",
)
X = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))


def attention():
    return nn.MultiheadAttention(16, 2, batch_first=True).eval().requires_grad_(False)


def flat(results):
    """Return the tensors in what a module returns."""
    if results is None or isinstance(results, torch.Tensor):
        return [] if results is None else [results]
    return [tensor for each in results for tensor in flat(each)]


LAST = torch.arange(3).eq(2).repeat(5, 1)


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": False}, {"key_padding_mask": LAST}], ids=["plain", "no weights", "mask"]
)
def test_fused_attention_is_computed_in_float32_where_that_is_faster(slow, recipe_counts, options):
    module = attention()
    expected = flat(module(X, X, X, **options))
    with autocast("cpu", recipe=slow), recipe_counts() as counts:
        results = flat(module(X, X, X, **options))
    assert [(each.op, each.recipe, each.declined) for each in counts.records()] == [
        ("aten::_native_multi_head_attention", "fastest:float32", "")
    ]
    assert len(results) == 1 + options.get("need_weights", True)
    assert all(torch.equal(*pair) for pair in zip(results, [each.bfloat16() for each in expected], strict=True))


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("make", [attention, pytest.param(lambda: nn.LSTM(16, 8), marks=needs_fast_lstm, id="LSTM")])
def test_modules_have_torchs_bits_where_the_fast_dtype_is_faster(quick, make):
    module = make()
    inputs = (X, X, X) if isinstance(module, nn.MultiheadAttention) else (X,)
    with torch.autocast("cpu"):
        expected = flat(module(*inputs))
    with autocast("cpu", recipe=quick):
        assert all(torch.equal(*pair) for pair in zip(flat(module(*inputs)), expected, strict=True))


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine is in Python
def test_a_module_that_repeats_a_call_does_not_ask_python_again(asked, slow):
    module = attention()
    with autocast("cpu", recipe=slow):
        first, again = flat(module(X, X, X)), flat(module(X, X, X))
        without_weights = [flat(module(X, X, X, need_weights=False)) for _ in range(2)]
    assert asked == ["_native_multi_head_attention"] * 2
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert torch.equal(without_weights[0][0], without_weights[1][0])
    assert [len(results) for results in without_weights] == [1, 1]


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 9, 32).transpose(0, 1),
        torch.randn(2, 3, 4, 32).permute(1, 2, 0, 3),
        torch.randn(4, 9, 64)[..., :32],
        torch.randn(4, 1, 32).expand(4, 9, 32),
        torch.randn(4, 32, 9).mT,
    ],
    ids=["transposed", "permuted", "left half", "expanded", "of columns"],
)
def test_an_activation_of_any_layout_is_multiplied_as_a_matrix(x, records, slow):
    layer = nn.Linear(32, 32).requires_grad_(records)
    with autocast("cpu", recipe=slow), torch.autograd.profiler.profile() as profile:
        results = [layer(given) for given in (x, x, x.contiguous())]
    assert all(torch.equal(result, results[-1]) for result in results)
    assert results[0].is_contiguous()
    assert "aten::bmm" not in {event.key for event in profile.key_averages()}


@needs_fast_lstm
@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("layers", [1, 2])
def test_a_recurrent_layer_is_computed_in_float32_where_that_is_faster(layers, slow):
    layer = nn.LSTM(16, 8, layers, bidirectional=True)
    expected = [each.bfloat16() for each in flat(layer(X))]
    off = 0 if layers == 1 else torch.finfo(torch.bfloat16).eps  # what is between layers is rounded, too
    with autocast("cpu", recipe=slow):
        for _ in range(2):
            torch.testing.assert_close(flat(layer(X)), expected, rtol=0, atol=off)


@pytest.fixture(params=["by the profile", "no instructions", "float16"])
def without_kernel(request, monkeypatch, quick):
    """Return the arguments of a region whose fast dtype is fast, and has no kernel for recurrent layers."""
    if request.param == "float16":
        if onednn_supports(torch.float16):
            pytest.skip("oneDNN has float16 here")
        return {"dtype": torch.float16, "recipe": quick}
    if request.param == "no instructions":
        monkeypatch.setattr(fastest_plan, "onednn_supports", lambda dtype: False)
        return {"dtype": torch.bfloat16, "recipe": Fastest(quick.profile, min_size=10**6)}
    others = tuple(each for each in quick.profile.measurements if (each.op, each.way) != ("lstm", "bfloat16"))
    raised = Omission("lstm", "bfloat16", "RuntimeError: no kernel")
    profile = replace(quick.profile, measurements=others, omissions=(raised,))
    return {"dtype": torch.bfloat16, "recipe": Fastest(profile)}


def assert_near(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


@needs_fast_lstm
def test_a_recurrent_layer_without_a_kernel_is_trained_and_used_in_float32(without_kernel):
    torch.manual_seed(0)  # the float32 kernels for training and for inference may differ in the last bit
    layer, dtype = nn.LSTM(16, 8, num_layers=2), without_kernel["dtype"]
    weights = tuple(layer.parameters())
    expected = flat(layer(X))
    gradients = torch.autograd.grad(expected[0].square().sum(), weights)
    for _ in range(2):
        with autocast("cpu", **without_kernel):
            found = flat(layer(X))
            with torch.no_grad():
                used = flat(layer(X))
        assert [each.dtype for each in found] == [dtype] * 3
        assert all(torch.equal(*pair) for pair in zip(found, used, strict=True))
        torch.testing.assert_close(found, [each.to(dtype) for each in expected], rtol=0.01, atol=0.01)
        assert_near(torch.autograd.grad(found[0].float().square().sum(), weights), gradients)


@needs_fast_lstm
def test_compiled_code_trains_a_recurrent_layer_without_a_kernel_in_float32(without_kernel, fresh_dynamo):
    layer = nn.LSTM(16, 8)

    def train(function):
        with autocast("cpu", **without_kernel):
            output = function(X)[0]
        return output, *torch.autograd.grad(output.float().square().sum(), tuple(layer.parameters()))

    expected, found = train(layer), train(torch.compile(layer, backend="aot_eager"))
    assert found[0].dtype is without_kernel["dtype"]
    assert_near(found, expected)


@needs_fast_lstm
@pytest.mark.usefixtures("no_grad", "fresh_dynamo")
def test_compiled_code_with_a_recurrent_layer_in_the_graph_uses_float32_without_a_kernel(without_kernel):
    layer = nn.LSTM(16, 8)
    expected = layer(X)[0].to(without_kernel["dtype"])
    with torch._dynamo.config.patch(allow_rnn=True), autocast("cpu", **without_kernel):
        found = torch.compile(layer, backend="aot_eager")(X)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@needs_fast_lstm
def test_a_recurrent_layer_trains_on_a_processor_without_bfloat16(launch, engine, quick, tmp_path):
    quick.profile.save(tmp_path / "profile.json")
    code = """
import torch, polycast
layer, x = torch.nn.LSTM(16, 8), torch.randn(5, 3, 16)
with polycast.autocast("cpu", recipe=polycast.Fastest("profile.json")):
    output = layer(x)[0]
output.float().sum().backward()
# The limit takes the kernel away on some processors only. Without it the recipe computes the layer in float32.
print(output.dtype is torch.bfloat16, layer.weight_ih_l0.grad.isfinite().all().item())
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "POLYCAST_ENGINE": engine}
    done = launch(code, folder=tmp_path, environment=environment)
    assert (done.stdout.split(), done.returncode) == (["True", "True"], 0), done.stderr
