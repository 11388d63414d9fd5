"""The recipe "fastest" on the op that computes a layer of nn.TransformerEncoder in eval mode, which has no policy."""

import pytest
import torch
from torch import nn

import polycast
from polycast import Fastest, autocast
from polycast_plugins.fastest.fastest_plan import FEW_ROWS, OTHER_OPS, REGISTERED
from polycast_plugins.fastest.recorded import NO_GRADIENTS

pytestmark = pytest.mark.usefixtures("engine")
OP = "aten::_transformer_encoder_layer_fwd"
X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


def layer(**options):
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options).eval().requires_grad_(False)


def padding():
    mask = torch.zeros(X.shape[:2], dtype=torch.bool)
    mask[1, 4:] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize(
    "masks",
    [{}, {"src_key_padding_mask": padding()}, {"src_mask": torch.ones(7, 7, dtype=torch.bool).triu(1)}],
    ids=["no mask", "padding", "causal"],
)
def test_a_layer_is_computed_as_one_in_float32_where_that_is_faster(slow, recipe_counts, options, masks, dtype):
    module, x = layer(**options), X.to(dtype)
    expected = module(x.float(), **masks).bfloat16()
    with autocast("cpu", recipe=slow), recipe_counts() as counts:
        results = [module(x, **masks) for _ in range(3)]
    assert all(torch.equal(result, expected) for result in results)
    assert counts == {("cpu", "fastest:float32", OP, ""): 3}


def test_layers_of_an_encoder_pass_on_the_fast_dtype(slow):
    encoder = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
    first, second = encoder.layers
    expected = second(first(X).bfloat16().float()).bfloat16()
    with autocast("cpu", recipe=slow):
        assert torch.equal(encoder(X), expected)


def test_a_layer_has_torchs_bits_where_the_fast_dtype_is_faster(quick, recipe_counts):
    module = layer()
    with torch.autocast("cpu"):
        expected = module(X)
    with autocast("cpu", recipe=quick), recipe_counts() as counts:
        assert all(torch.equal(module(X), expected) for _ in range(3))
    (declined,) = {each.declined for each in counts.records() if each.op == OP}
    assert declined.startswith("no other way takes less than 1.0 of bfloat16's time")


@pytest.mark.parametrize(
    ("dtype", "ratio", "ways"),
    [
        (torch.float32, 0.86, ["fastest:float32"]),  # in a region the fast dtype takes 1.2 times as long
        (torch.float32, 0.8, []),
        (torch.bfloat16, 1.02, ["fastest:float32"]),
        (torch.bfloat16, 0.98, []),
    ],
)
def test_the_way_of_a_layer_depends_on_the_dtype_of_its_input(profile_of, recipe_counts, dtype, ratio, ways):
    profile = profile_of(overhead=1e-15, cast=1e-15, bfloat16=ratio)
    with autocast("cpu", recipe=Fastest(profile)), recipe_counts() as counts:
        layer()(X.to(dtype))
    assert [each.recipe for each in counts.records() if each.op == OP and not each.declined] == ways


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("profile", ["slow", "quick"])
def test_nested_tensors_are_computed_in_the_fast_dtype(profile, request):
    encoder = nn.TransformerEncoder(layer(), 2)
    expected = encoder(X, src_key_padding_mask=padding())
    for _ in range(2):
        with autocast("cpu", recipe=request.getfixturevalue(profile)):
            result = encoder(X, src_key_padding_mask=padding())
        assert result.dtype is torch.bfloat16
        assert float((result - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("profile", ["slow", "quick"])
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # it cannot be observed
def test_its_operations_are_counted_once(profile, request):
    module = layer()
    flops = []
    for recipe in ("none", request.getfixturevalue(profile)):
        with polycast.observe(module) as seen, autocast("cpu", recipe=recipe):
            module(X)
        flops.append(sum(each.flops for each in seen.matmuls))
    assert flops[0] == flops[1] > 0


def test_a_profile_without_the_op_leaves_its_inner_ops_to_the_recipe(profile_of, recipe_counts):
    profile = profile_of(overhead=1e-15, cast=1e-15, bfloat16={"encoder_layer": None, "other": 9.0})
    with autocast("cpu", recipe=Fastest(profile)), recipe_counts() as counts:
        layer()(X)
    assert {each.op: each.declined for each in counts.records()} == {
        OP: "the profile has no bfloat16 encoder_layer",
        **dict.fromkeys(("aten::_native_multi_head_attention", "aten::_addmm_activation", "aten::addmm"), ""),
    }


def test_the_inner_ops_of_few_rows_are_computed_one_by_one(slow, recipe_counts):
    module = layer()
    with autocast("cpu", recipe=slow), recipe_counts() as counts:
        result = module(X[:2])
    declined = {each.op: each.declined for each in counts.records()}
    assert declined.pop(OP) == FEW_ROWS
    assert set(declined) == {"aten::_native_multi_head_attention", "aten::_addmm_activation", "aten::addmm"}
    torch.testing.assert_close(result.float(), module(X[:2]), rtol=0.02, atol=0.02)


def arguments(module, x):
    attention = module.self_attn
    norms = (module.norm1.weight, module.norm1.bias, module.norm2.weight, module.norm2.bias)
    linears = (module.linear1.weight, module.linear1.bias, module.linear2.weight, module.linear2.bias)
    into = (attention.in_proj_weight, attention.in_proj_bias)
    out = (attention.out_proj.weight, attention.out_proj.bias)
    return (x, 16, 2, *into, *out, False, False, 1e-5, *norms, *linears)


def test_a_call_that_autograd_would_record_is_left_to_torch(slow, recipe_counts):
    given = arguments(layer(), X.clone().requires_grad_())
    with autocast("cpu", recipe=slow), recipe_counts() as counts:
        torch._transformer_encoder_layer_fwd(*given)
    assert {each.declined for each in counts.records() if each.op == OP} == {NO_GRADIENTS}


def test_a_changed_weight_is_read_at_the_next_call(slow):
    module = layer()
    with autocast("cpu", recipe=slow):
        module(X)
        module.linear1.weight.data.mul_(3)
        result = module(X)
    assert torch.equal(result, module(X).bfloat16())


def test_a_recipe_for_other_ops_and_a_region_without_one_leave_the_layer_to_torch(slow, recipe_counts):
    module = layer()
    with torch.autocast("cpu"):
        expected = module(X)
    with autocast("cpu", recipe=slow):
        module(X)  # which makes a kernel for the op
    with autocast("cpu"):
        assert torch.equal(module(X), expected)
    others = Fastest(slow.profile, ops=["_native_multi_head_attention"])
    with autocast("cpu", recipe=others), recipe_counts() as counts:
        module(X)
    assert {each.op for each in counts.records()} == {"aten::_native_multi_head_attention"}


def test_a_policy_for_the_op_goes_before_the_recipe(slow, recipe_counts):
    module = layer()
    with autocast("cpu", recipe=slow, policy={"_transformer_encoder_layer_fwd": "fp32"}), recipe_counts() as counts:
        result = module(X)
    assert torch.equal(result, module(X))
    assert result.dtype is torch.float32
    assert not counts.records()


def outcome(module, region):
    """Return the dtype of what a module returns in a region, or the error that it raises."""
    try:
        with region:
            return module(X).dtype
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("inner", ["addmm", "_addmm_activation", "layer_norm"])
@pytest.mark.parametrize("policy", ["fp32", "banned"])
def test_policies_for_inner_ops_apply(slow, inner, policy):
    module = layer()
    seen = [outcome(module, autocast("cpu", recipe=recipe, policy={inner: policy})) for recipe in (None, slow)]
    assert seen[0] == seen[1]


def test_a_registered_policy_for_an_inner_op_applies(slow, recipe_counts):
    module, region = layer(), autocast("cpu", recipe=slow)
    with region:
        assert {module(X).dtype for _ in range(3)} == {torch.bfloat16}
    registration = polycast.register_op("native_layer_norm", "fp32")
    try:
        with region:
            assert module(X).dtype is torch.float32
        with region, recipe_counts() as counts:
            module(X)
    finally:
        registration.remove()
    assert {each.declined for each in counts.records() if each.op == OP} == {REGISTERED}
    with region, recipe_counts() as counts:
        module(X)
    assert [each.declined for each in counts.records()] == [""]


def test_a_layer_of_several_dtypes_is_left_to_torch(slow):
    module = layer()
    expected = module(X)
    module.norm1.half()
    with autocast("cpu", recipe=slow):
        y = module(X)
    torch.testing.assert_close(y.float(), expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("inner", ["_transformer_encoder_layer_fwd", "layer_norm"])
def test_a_layer_whose_inner_ops_another_library_computes_is_not_one(slow, inner):
    polycast.uninstall()
    called = []

    def kernel(x, *others):
        called.append(inner)
        return x.float()

    library = torch.library.Library("aten", "IMPL")
    library.impl(inner, kernel, "AutocastCPU")
    seen = []
    try:
        for region in (torch.autocast("cpu"), autocast("cpu", recipe=slow)):
            with region:
                seen.append((layer()(X).dtype, len(called)))
            called.clear()
    finally:
        library._destroy()
    assert seen[0] == seen[1]
    assert seen[0][1]


@pytest.mark.parametrize("inner", ["native_layer_norm", "_addmm_activation"])
@pytest.mark.parametrize("policy", [polycast.CastPolicy.FP32, polycast.CastPolicy.BANNED], ids=str)
def test_a_table_with_other_policies_for_inner_ops_applies(slow, other_cpu, inner, policy):
    other_cpu(policies={**polycast.plugin.get_backend("cpu").policies, f"aten::{inner}": policy})
    for recipe in (None, slow):
        with autocast("cpu", recipe=recipe):
            declined = polycast.explain(OP.removeprefix("aten::"), device_type="cpu").declined
            assert declined == (recipe and OTHER_OPS)
    assert outcome(layer(), autocast("cpu")) == outcome(layer(), autocast("cpu", recipe=slow))


def test_explain_tells_the_way_of_the_layer(slow):
    given = arguments(layer(), X)
    with autocast("cpu", recipe=slow):
        every = str(polycast.explain("_transformer_encoder_layer_fwd", device_type="cpu"))
        call = polycast.explain("_transformer_encoder_layer_fwd", *given, device_type="cpu")
    assert "the recipe fastest computes it, or it runs unchanged, and autocast applies to its inner ops" in every
    assert (call.policy, call.way, call.declined) == (None, "float32", None)
    assert "the recipe fastest computes it in float32: float32 takes 0.09 of bfloat16's time" in str(call)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine is in Python
def test_a_layer_that_repeats_a_call_does_not_ask_python_again(asked, slow):
    module = layer()
    with autocast("cpu", recipe=slow):
        for _ in range(3):
            module(X)
    assert asked == [OP.removeprefix("aten::")]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_are_computed_in_the_same_way(slow, backend):
    module = layer()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    with torch.no_grad(), autocast("cpu", recipe=slow):
        assert torch.equal(compiled(X), module(X))
    with torch.no_grad(), torch.autocast("cpu"):
        expected = torch.compile(module, backend=backend, fullgraph=True)(X)
    with torch.no_grad(), autocast("cpu"):
        assert torch.equal(compiled(X), expected)
