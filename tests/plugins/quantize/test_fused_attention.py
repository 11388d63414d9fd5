"""torch's attention modules in regions with a recipe, which their fused path would ignore."""

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch.backends import mha

import polycast

RECIPE = polycast.Int8(min_size=1)
X = torch.randn(2, 5, 8)


@pytest.fixture(autouse=True)
def _inference(engine, int8_kernels):
    with torch.no_grad():
        yield


def attention():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    return lambda x: layer(x, x, x)[0]


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()


def profiled(model, recipe, **region):
    with torch.autograd.profiler.profile() as profile, polycast.autocast("cpu", recipe=recipe, **region):
        result = model(X)
    return result, {event.key for event in profile.key_averages()}


def is_fused(model, recipe, **region):
    _, ops = profiled(model, recipe, **region)
    return not ops.isdisjoint(("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"))


@pytest.mark.parametrize(("make", "linears"), [(attention, 2), (encoder, 8)])
def test_the_linears_of_attention_modules_in_eval_mode_are_computed_by_the_recipe(recipe_counts, make, linears):
    model = make()
    with recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
        model(X)
    assert [(each.op, each.declined, each.calls) for each in counts.records()] == [("aten::linear", "", linears)]


def test_no_weight_that_the_recipe_declines_is_copied_for_each_batch():
    model = encoder()  # which transposes its input: batches are not one after another
    result, ops = profiled(model, polycast.Int8(min_size=2**16))
    assert {"aten::addmm", "aten::bmm"} & ops == {"aten::addmm"}
    torch.testing.assert_close(result.float(), model(X), atol=0.05, rtol=0.05)


REGIONS = {
    "no recipe": {"recipe": "none"},
    "disabled": {"recipe": RECIPE, "enabled": False},
    "not for linears": {"recipe": polycast.Int8(ops=["mm"])},
    "a policy for linears": {"recipe": RECIPE, "policy": {"linear": "fp32"}},
}


@pytest.mark.parametrize("make", [attention, encoder])
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_regions_whose_recipe_computes_no_linears_have_the_fused_path(make, region):
    assert is_fused(make(), **region)


@pytest.mark.parametrize("make", [attention, encoder])
def test_a_recipe_without_changes_to_torch_has_the_fused_path_after_one_with_them(make, monkeypatch):
    model = make()
    for features, fused in ((polycast.Int8.features, False), ((), True)):
        monkeypatch.setattr(polycast.Int8, "features", features)
        assert is_fused(model, RECIPE) is fused


def test_what_a_program_has_switched_off_stays_off():
    mha.set_fastpath_enabled(False)
    try:
        with polycast.autocast("cpu", recipe=RECIPE):
            assert not mha.get_fastpath_enabled()
        assert not mha.get_fastpath_enabled()
    finally:
        mha.set_fastpath_enabled(True)
    assert mha.get_fastpath_enabled()


def test_compiled_code_is_as_the_region_that_it_runs_in(recipe_counts):
    model = encoder()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(X)
    for recipe, count in ((RECIPE, 1), ("none", 0), (RECIPE, 1)):
        with recipe_counts() as counts, polycast.autocast("cpu", recipe=recipe):
            compiled(X)
        assert len(counts.records()) == count
    with polycast.autocast("cpu", recipe=RECIPE):
        assert torch.equal(compiled(X), model(X))


def test_attention_is_compiled_after_uninstalling_what_dynamo_has_met():
    trace_rules.get_torch_obj_rule_map.cache_clear()
    with polycast.autocast("cpu", recipe=RECIPE):
        assert mha.get_fastpath_enabled in trace_rules.get_torch_obj_rule_map()
    polycast.uninstall()
    assert mha.get_fastpath_enabled in trace_rules.get_torch_obj_rule_map()


PROGRAM = """
import torch, polycast
from torch import nn

model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
x = torch.randn(3, 7, 8)
for feature in polycast.Int8.features:  # as a region with the recipe, which may compile its kernels
    feature.make()
with torch.no_grad(), polycast.autocast("cpu", policy={"softplus": "fp32"}):
    expected = model(x)
    assert "torch._dynamo" not in __import__("sys").modules
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
"""


@pytest.mark.slow
def test_attention_is_compiled_where_dynamo_is_imported_in_a_region(launch):
    done = launch(PROGRAM)
    assert done.returncode == 0, done.stderr


def test_attention_is_scripted_in_a_region_with_a_recipe():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with polycast.autocast("cpu", recipe=RECIPE):
        scripted = torch.jit.script(layer)
    torch.testing.assert_close(scripted(X, X, X)[0], layer(X, X, X)[0])


def test_uninstalling_gives_torch_its_function_back():
    with polycast.autocast("cpu", recipe=RECIPE):
        pass
    polycast.uninstall()
    assert mha.get_fastpath_enabled.__module__ == "torch.backends.mha"
    with polycast.autocast("cpu", recipe=RECIPE):
        assert not mha.get_fastpath_enabled()


def padded(layers, **options):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), layers, **options).eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return lambda x: model(x, src_key_padding_mask=mask)[~mask]


def of_nested(make):
    model = make()
    return lambda x: torch.cat(model(torch.nested.nested_tensor([x[0], x[1, :3]])).unbind())


NESTED = {
    "an encoder with a padding mask": lambda: padded(2),
    "one that does not check its mask": lambda: padded(2, mask_check=False),
    "one that makes no nested tensors": lambda: padded(2, enable_nested_tensor=False),
    "an encoder of nested tensors": lambda: of_nested(encoder),
    "an attention of nested tensors": lambda: of_nested(attention),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_nested_tensors_are_computed_in_each_region(make):
    model = make()
    expected = model(X)
    for region in ({}, {"cache": polycast.WeightCache()}, {"recipe": RECIPE}):
        for _ in range(2):
            with polycast.autocast("cpu", **region):
                result = model(X)
            assert float((result - expected).norm() / expected.norm()) < 0.05, region
