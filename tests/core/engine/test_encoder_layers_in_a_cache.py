"""Cached casts of the weights of nn.TransformerEncoderLayer, whose fused op takes views of them below autograd."""

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast

pytestmark = NATIVE
OP = torch._transformer_encoder_layer_fwd
MATRICES = 4
BIASES = 4
X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


def layer(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options).eval()


def in_torch(module, x, **masks):
    with torch.autocast("cpu"):
        return module(x, **masks)


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_weight_is_cast_once(cache, options, mode, frozen, dtype):
    module, x = layer(**options).requires_grad_(not frozen), X.to(dtype)
    with mode():
        expected = in_torch(module, x)
        for _ in range(3):
            with polycast.autocast("cpu", cache=cache):
                assert torch.equal(module(x), expected)
    assert (cache.stats().misses, cache.stats().entries) == (MATRICES + BIASES,) * 2


def test_a_region_of_its_own_has_torchs_bits():
    module = layer().requires_grad_(False)
    with polycast.autocast("cpu"):
        results = [module(X) for _ in range(3)]
    assert all(torch.equal(result, in_torch(module, X)) for result in results)


@pytest.mark.parametrize("options", [{}, {"norm_first": True}], ids=str)
@pytest.mark.parametrize("settings", [{}, {"cache": polycast.WeightCache()}], ids=["", "cache"])
def test_the_result_may_be_written_where_autograd_records(options, settings):
    module, parameter = layer(**options), nn.Parameter(torch.zeros(16))
    with torch.no_grad(), polycast.autocast("cpu", **settings):
        results = [module(X) for _ in range(3)]
    for result in results:
        assert not result._is_view()
        result += parameter
        assert result.requires_grad


@pytest.mark.parametrize("name", ["linear1", "linear2"])
@pytest.mark.parametrize("data", [True, False])
def test_a_written_weight_is_cast_again(cache, name, data):
    module = layer().requires_grad_(False)
    with polycast.autocast("cpu", cache=cache):
        before = module(X)
        weight = getattr(module, name).weight
        (weight.data if data else weight).mul_(3)
        after = module(X)
    assert torch.equal(after, in_torch(module, X))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("inner", ["addmm", "_addmm_activation"])
def test_a_policy_for_an_inner_op_keeps_its_weight_in_float32(cache, inner):
    module = layer().requires_grad_(False)
    policy = {inner: "fp32"}
    with polycast.autocast("cpu", policy=policy):
        expected = module(X)
    with polycast.autocast("cpu", policy=policy, cache=cache):
        assert all(torch.equal(module(X), expected) for _ in range(2))
    assert cache.stats().misses < MATRICES + BIASES


def test_a_call_that_autograd_records_raises_as_in_torch(cache):
    module = layer()
    attention = module.self_attn
    norms = (module.norm1.weight, module.norm1.bias, module.norm2.weight, module.norm2.bias)
    linears = (module.linear1.weight, module.linear1.bias, module.linear2.weight, module.linear2.bias)
    into = (attention.in_proj_weight, attention.in_proj_bias)
    out = (attention.out_proj.weight, attention.out_proj.bias)
    given = (X, 16, 2, *into, *out, False, False, 1e-5, *norms, *linears)
    outcomes = []
    for region in (torch.autocast("cpu"), polycast.autocast("cpu", cache=cache)):
        with region:
            result = OP(*given)
            try:
                result.sum().backward()
                outcomes.append([parameter.grad for parameter in module.parameters()])
            except RuntimeError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_nested_tensors_are_computed_in_the_fast_dtype_with_cached_weights(cache, options):
    module = layer(**options).requires_grad_(False)
    nested = torch.nested.nested_tensor([X[0], X[1, :4]])
    expected = module(nested)
    for given in (nested, nested.bfloat16()):
        with polycast.autocast("cpu", cache=cache):
            result = module(given)
        assert (result.is_nested, result.dtype) == (True, torch.bfloat16)
        for found, exact in zip(result.unbind(), expected.unbind(), strict=True):
            assert float((found - exact).norm() / exact.norm()) < 0.01
    assert cache.stats().misses == len(list(module.parameters()))
    with polycast.autocast("cpu", policy={"_transformer_encoder_layer_fwd": "fp32"}):
        assert module(nested.bfloat16()).dtype is torch.float32


def test_fake_tensors_are_as_in_torch(cache):
    module = layer().requires_grad_(False)
    results = []
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        for region in (torch.autocast("cpu"), polycast.autocast("cpu", cache=cache)):
            with region:
                results.append(module(torch.empty(3, 7, 16)))
    assert results[0].dtype is results[1].dtype


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_vmapped_layer_has_torchs_result(cache):
    module, many = layer().requires_grad_(False), torch.randn(2, 3, 7, 16)
    results = []
    for region in (torch.autocast("cpu"), polycast.autocast("cpu", cache=cache)):
        with region:
            results.append(torch.vmap(module)(many))
    assert torch.equal(*results)
