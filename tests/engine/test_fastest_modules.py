"""The recipe "fastest" on the fused ops of torch's attention and recurrent modules, which have several results."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polycast import Fastest, autocast
from polycast.engine.low_bit.fastest import FastestPlan
from polycast.profiling.measurement import Omission

pytestmark = pytest.mark.usefixtures("engine")
HAS_FAST_LSTM = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
X = torch.randn(5, 3, 16)


@pytest.fixture
def slow(profile_of):
    """Return the profile of a machine where only float32 is fast."""
    return profile_of(overhead=1e-15, cast=1e-15, bfloat16=9.0)


@pytest.fixture
def quick(profile_of):
    """Return the profile of a machine where all but float32 is fast."""
    return profile_of(overhead=1e-15, cast=1e-15, bfloat16=0.1)


@pytest.fixture
def without_fast_lstm(quick):
    """Return the profile of a machine where the fast dtype is fast, and has no kernel for recurrent layers."""
    others = tuple(each for each in quick.measurements if (each.op, each.way) != ("lstm", "bfloat16"))
    return replace(quick, measurements=others, omissions=(Omission("lstm", "bfloat16", "RuntimeError: no kernel"),))


def attention():
    return nn.MultiheadAttention(16, 2, batch_first=True).eval().requires_grad_(False)


def flat(results):
    """Return the tensors in what a module returns."""
    if results is None or isinstance(results, torch.Tensor):
        return [] if results is None else [results]
    return [tensor for each in results for tensor in flat(each)]


@pytest.mark.parametrize("need_weights", [True, False])
def test_fused_attention_is_computed_in_float32_where_that_is_faster(slow, low_bit_counts, need_weights):
    module = attention()
    expected = flat(module(X, X, X, need_weights=need_weights))
    with autocast("cpu", recipe=Fastest(slow)), low_bit_counts() as counts:
        results = flat(module(X, X, X, need_weights=need_weights))
    assert [(each.op, each.recipe) for each in counts.records()] == [
        ("aten::_native_multi_head_attention", "fastest:float32")
    ]
    assert len(results) == 1 + need_weights
    assert all(torch.equal(*pair) for pair in zip(results, [each.bfloat16() for each in expected], strict=True))


def test_fused_attention_has_torchs_bits_where_the_fast_dtype_is_faster(quick):
    module = attention()
    with torch.autocast("cpu"):
        expected = flat(module(X, X, X))
    with autocast("cpu", recipe=Fastest(quick)):
        assert all(torch.equal(*pair) for pair in zip(flat(module(X, X, X)), expected, strict=True))


def test_an_encoder_computes_all_linears_of_its_fused_path_in_float32_where_that_is_faster(slow, low_bit_counts):
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    with autocast("cpu", recipe=Fastest(slow)), low_bit_counts() as counts:
        result = encoder(X)
    assert {each.recipe for each in counts.records()} == {"fastest:float32"}
    assert {each.op for each in counts.records()} == {
        *("aten::_native_multi_head_attention", "aten::_addmm_activation", "aten::addmm")
    }
    torch.testing.assert_close(result.float(), encoder(X), rtol=0.02, atol=0.02)


def test_a_module_that_repeats_a_call_does_not_ask_python_again(engine, slow, monkeypatch):
    if engine == "reference":
        pytest.skip("the reference engine is in Python")
    asked = []
    choice = FastestPlan.choice
    monkeypatch.setattr(FastestPlan, "choice", lambda plan, op, *args: asked.append(op) or choice(plan, op, *args))
    module = attention()
    with autocast("cpu", recipe=Fastest(slow)):
        first, again = flat(module(X, X, X)), flat(module(X, X, X))
        without_weights = [flat(module(X, X, X, need_weights=False)) for _ in range(2)]
    assert asked == ["aten::_native_multi_head_attention"] * 2
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert torch.equal(without_weights[0][0], without_weights[1][0])
    assert [len(results) for results in without_weights] == [1, 1]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("profile", ["slow", "without_fast_lstm"])
def test_a_recurrent_layer_is_computed_in_float32_where_that_is_faster_or_all_there_is(profile, request):
    layer = nn.LSTM(16, 8)
    expected = [each.bfloat16() for each in flat(layer(X))]
    with autocast("cpu", recipe=Fastest(request.getfixturevalue(profile))):
        for _ in range(2):
            assert all(torch.equal(*pair) for pair in zip(flat(layer(X)), expected, strict=True))


@pytest.mark.skipif(not HAS_FAST_LSTM, reason="oneDNN has no bfloat16 here")
@pytest.mark.usefixtures("no_grad")
def test_a_recurrent_layer_has_torchs_bits_where_the_fast_dtype_is_faster(quick):
    layer = nn.LSTM(16, 8)
    with torch.autocast("cpu"):
        expected = flat(layer(X))
    with autocast("cpu", recipe=Fastest(quick)):
        assert all(torch.equal(*pair) for pair in zip(flat(layer(X)), expected, strict=True))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_a_recurrent_layer_is_trained_in_float32_where_the_fast_dtype_has_no_kernel(without_fast_lstm):
    layer = nn.LSTM(16, 8)
    weights = tuple(layer.parameters())
    for _ in range(2):
        expected = torch.autograd.grad(layer(X)[0].square().sum(), weights)
        with autocast("cpu", recipe=Fastest(without_fast_lstm)):
            output = layer(X)[0]
        assert output.dtype is torch.bfloat16
        found = torch.autograd.grad(output.float().square().sum(), weights)
        assert all(each.dtype is torch.float32 for each in found)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())
