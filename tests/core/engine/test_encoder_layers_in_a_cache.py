"""Cached casts of the weights of nn.TransformerEncoderLayer, whose fused op takes views of them below autograd."""

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast

pytestmark = NATIVE
MATRICES = 4
BIASES = 4
X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


def layer(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options).eval()


def in_torch(function, *args):
    with torch.autocast("cpu"):
        return function(*args)


@pytest.fixture
def in_region(cache):
    """Return a function that calls another in a region with the cache."""

    def in_region(function, *args):
        with polycast.autocast("cpu", cache=cache):
            return function(*args)

    return in_region


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize(
    ("mode", "frozen"),
    [(torch.no_grad, True), (torch.no_grad, False), (torch.inference_mode, False), (torch.enable_grad, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_weight_is_cast_once(any_cache, options, mode, frozen, dtype):
    module, x = layer(**options).requires_grad_(not frozen), X.to(dtype)
    with mode():
        expected = in_torch(module, x)
        for _ in range(2):
            with polycast.autocast("cpu", cache=any_cache):
                assert torch.equal(module(x), expected)
                assert torch.equal(module(x), expected)
    if any_cache is not None:
        assert (any_cache.stats().misses, any_cache.stats().entries) == (MATRICES + BIASES,) * 2


@pytest.mark.parametrize("options", [{}, {"norm_first": True}], ids=str)
def test_the_result_may_be_written_where_autograd_records(options, any_cache):
    module, parameter = layer(**options), nn.Parameter(torch.zeros(16))
    with torch.no_grad(), polycast.autocast("cpu", cache=any_cache):
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


def test_a_call_that_autograd_records_raises_as_in_torch(in_region):
    module = layer()
    attention, norms = module.self_attn, [*module.norm1.parameters(), *module.norm2.parameters()]
    linears = [*module.linear1.parameters(), *module.linear2.parameters()]
    into, out = (attention.in_proj_weight, attention.in_proj_bias), [*attention.out_proj.parameters()]

    def call():
        result = torch._transformer_encoder_layer_fwd(X, 16, 2, *into, *out, False, False, 1e-5, *norms, *linears)
        with pytest.raises(RuntimeError) as raised:
            result.sum().backward()
        return str(raised.value)

    assert in_torch(call) == in_region(call)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_nested_tensors_are_computed_in_the_fast_dtype_with_cached_weights(in_region, cache, options):
    module = layer(**options).requires_grad_(False)
    nested = torch.nested.nested_tensor([X[0], X[1, :4]])
    expected = module(nested)
    for given in (nested, nested.bfloat16()):
        result = in_region(module, given)
        assert (result.is_nested, result.dtype) == (True, torch.bfloat16)
        for found, exact in zip(result.unbind(), expected.unbind(), strict=True):
            assert float((found - exact).norm() / exact.norm()) < 0.01
    assert cache.stats().misses == len(list(module.parameters()))
    with polycast.autocast("cpu", policy={"_transformer_encoder_layer_fwd": "fp32"}):
        assert module(nested.bfloat16()).dtype is torch.float32


def test_fake_tensors_are_as_in_torch(in_region):
    module = layer().requires_grad_(False)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 7, 16)
        assert in_torch(module, x).dtype is in_region(module, x).dtype


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_vmapped_layer_has_torchs_result(in_region):
    call, many = torch.vmap(layer().requires_grad_(False)), torch.randn(2, 3, 7, 16)
    assert torch.equal(in_torch(call, many), in_region(call, many))
