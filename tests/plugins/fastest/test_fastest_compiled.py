"""The recipe "fastest" in compiled code."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import polycast
from polycast import Fastest, WeightCache, autocast

pytestmark = pytest.mark.usefixtures("engine", "fresh_dynamo")
X = torch.randn(16, 64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


class Graphs:
    """A backend that keeps the names of the ops in each graph of ATen ops."""

    def __init__(self):
        self.ops = []

    def __call__(self, module, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def compile(graph, _):
            self.ops.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compile)(module, inputs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_inference_compiles_to_torchs_ops(model, float32_way, dynamic):
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=dynamic)
    with torch.no_grad(), autocast("cpu", recipe=float32_way):
        for rows in (24, 30):
            x = torch.randn(rows, 64)
            assert torch.equal(compiled(x), model(x))
    assert not any("polycast" in op for op in graphs.ops[-1])
    assert graphs.ops[-1].count("aten.addmm.default") == 2
    assert not dynamic or len(graphs.ops) == 1


def trained(function, x, weights, recipe, loss=torch.sum):
    """Return the result of a function, and the gradients of its loss."""
    with autocast("cpu", recipe=recipe):
        result = function(x)
    return result, *torch.autograd.grad(loss(result), weights)


def test_training_compiles_to_the_gradients_of_eager_code(model, float32_way, quick):
    compiled, weights = torch.compile(model, backend="aot_eager", fullgraph=True), tuple(model.parameters())
    for recipe in (float32_way, quick):
        found = [trained(function, X, weights, recipe) for function in (model, compiled)]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_training_with_attention_compiles_to_the_gradients_of_eager_code(float32_way, quick):
    weight = nn.Parameter(torch.randn(16, 16))
    x = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def function(x):
        x = torch.nn.functional.linear(x, weight)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for recipe in (float32_way, quick):
        result, *gradients = trained(function, x, (x, weight), recipe)
        compiled_result, *compiled_gradients = trained(compiled, x, (x, weight), recipe)
        assert torch.equal(compiled_result, result)
        # Compiled code computes the attention again in the backward; eager code saves the result, rounded.
        for ours, theirs in zip(compiled_gradients, gradients, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 2**-7


def test_another_profile_is_another_code(model, float32_way, quick):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    equal = Fastest(polycast.DeviceProfile.from_json(quick.profile.to_json()))
    with torch.no_grad():
        for recipe, count in ((float32_way, 1), (quick, 2), (float32_way, 2), (equal, 2)):
            with autocast("cpu", recipe=recipe):
                assert torch.equal(compiled(X), model(X))
            assert counter.frame_count == count
        with autocast("cpu"):
            assert torch.equal(compiled(X), model(X))


def test_a_region_may_be_in_the_code(model, monkeypatch, float32_way, tmp_path):
    path = tmp_path / "profile.json"
    float32_way.profile.save(path)
    monkeypatch.setenv("POLYCAST_PROFILE", str(path))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x, recipe):
        with autocast("cpu", recipe=recipe):
            return model(x)

    with torch.no_grad(), autocast("cpu", recipe=float32_way):
        expected = model(X)
    with torch.no_grad():
        assert torch.equal(function(X, "fastest"), expected)
        assert torch.equal(function(X, float32_way), expected)


def test_a_rule_for_a_module_may_be_the_recipe(model, monkeypatch, float32_way, tmp_path):
    path = tmp_path / "profile.json"
    float32_way.profile.save(path)
    policy = polycast.Policy(modules={"0": Fastest(str(path))})
    policy.save(tmp_path / "policy.toml")
    with torch.no_grad(), polycast.apply_policy(model, tmp_path / "policy.toml"), autocast("cpu"):
        expected = model(X)
        assert torch.equal(torch.compile(model, backend="aot_eager")(X), expected)
        with autocast("cpu", recipe=float32_way):
            of_first = model[0](X)
        assert torch.equal(model[0](X), of_first)


def test_a_backends_kernel_gets_the_cached_cast_in_compiled_code(model, recipe_of, register_kernel):
    register_kernel()
    recipe, x = recipe_of(bfloat16=9.0, bfloat16_kernel=0.01), X[:4]
    graphs, cache = Graphs(), WeightCache()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad(), autocast("cpu", recipe=recipe, cache=cache):
        expected = model(x)
        assert torch.equal(compiled(x), expected)
        model[0].weight.mul_(2)
        assert not torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), model(x))
    assert sum("cached_cast" in op for op in graphs.ops[-1]) == 1  # a compiler fuses the cast of a small weight


def test_what_is_exported_in_a_region_has_torchs_ops(model, float32_way):
    with torch.no_grad(), autocast("cpu", recipe=float32_way):
        exported = torch.export.export(model, (X,))
    assert not any("polycast" in str(node.target) for node in exported.graph.nodes)


@pytest.mark.slow
def test_inductor_computes_the_same(model, float32_way):
    compiled, weights = torch.compile(model, fullgraph=True), tuple(model.parameters())
    (expected, *theirs), (found, *ours) = (
        trained(function, X, weights, float32_way, lambda result: result.float().pow(2).mean())
        for function in (model, compiled)
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
    with torch.no_grad(), autocast("cpu", recipe=float32_way):
        torch.testing.assert_close(compiled(X), model(X), rtol=2e-2, atol=2e-2)


def test_compiled_attention_with_a_boolean_mask_stays_in_the_fast_dtype(float32_way):
    def attend(q, mask):
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, mask = torch.randn(2, 4, 16, 32), torch.ones(16, 16, dtype=torch.bool).tril()
    with torch.no_grad():
        with autocast("cpu"):
            plain = attend(q, mask)
        with autocast("cpu", recipe=float32_way):
            assert not torch.equal(attend(q, mask), plain)
            assert torch.equal(torch.compile(attend, backend="aot_eager", fullgraph=True)(q, mask), plain)
