"""torch.compile: regions with policies in compiled code, and in what is compiled for later."""

import contextlib

import pytest
import torch

import polycast
from polycast import CastPolicy

pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


POLICY = {"aten::linear": CastPolicy.FP32}
MM_UP = {"mm": "fp32"}
X = torch.ones(2, 2)


def with_dict_inside(x, layer):
    with polycast.autocast("cpu", policy={"linear": "fp32"}):
        return layer(x)


def with_global_dict(x, layer):
    with polycast.autocast("cpu", policy=POLICY):
        return layer(x)


@pytest.mark.parametrize("function", [with_dict_inside, with_global_dict])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_policy_inside_applies_in_one_graph(data, function, backend):
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert compiled(*data).dtype is torch.float32
    with polycast.autocast("cpu"):
        assert compiled(*data).dtype is torch.float32
        assert data[1](data[0]).dtype is torch.bfloat16
    assert polycast.autocast_nesting("cpu") == 0


def test_another_policy_inside_recompiles(data):
    def function(x, layer, policy):
        with polycast.autocast("cpu", policy={"linear": policy}):
            return layer(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = [compiled(*data, policy).dtype for policy in ("fp32", "lower_precision_fp", "fp32")]
    assert found == [torch.float32, torch.bfloat16, torch.float32]


def test_the_policy_inside_is_gone_where_tracing_fails_in_the_middle(data):
    def function(x, layer):
        with polycast.autocast("cpu", policy={"linear": "fp32"}):
            y = layer(x)
            torch._dynamo.graph_break()
            return y, layer(x)

    assert {y.dtype for y in torch.compile(function, backend="eager")(*data)} == {torch.float32}
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend="eager", fullgraph=True)(*data)
    assert polycast.autocast_nesting("cpu") == 0
    with polycast.autocast("cpu"):
        assert data[1](data[0]).dtype is torch.bfloat16


@torch._dynamo.disable(recursive=False)
def apart(x):
    return x @ x


def test_what_a_compiled_function_calls_in_its_policy_is_compiled_under_it():
    @torch.compile(backend="aot_eager")
    def function(x):
        before = apart(x)
        with polycast.autocast("cpu", policy={"matmul": "fp32"}):
            inside = apart(x)
        return before, inside, apart(x)

    for _ in range(2):
        with polycast.autocast("cpu"):
            assert [y.dtype for y in function(X)] == [torch.bfloat16, torch.float32, torch.bfloat16]


HELD = polycast.Policy({"linear": "fp32"})


def with_value(x, layer):
    with polycast.autocast("cpu", policy=HELD):
        return layer(x)


def with_region_from_outside():
    held = polycast.autocast("cpu", policy=POLICY)

    def function(x, layer):
        with held:
            return layer(x)

    return function


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (with_value, "a graph can hold a policy= only as a dict of names"),
        (with_region_from_outside(), "it has a policy= or a recipe= and was made outside of the compiled code"),
    ],
)
def test_what_no_graph_can_hold_of_a_policy_breaks_it(data, function, reason):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"this region cannot be traced: {reason}"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*data)
    assert torch.compile(function, backend="aot_eager")(*data).dtype is torch.float32


def square(x):
    return torch.mm(x, x)


@pytest.mark.slow
def test_code_that_was_compiled_ahead_of_time_without_policies_is_refused_with_some():
    function = torch.compile(square, backend="inductor", fullgraph=True)
    if not hasattr(function, "aot_compile"):
        pytest.skip(f"torch {torch.__version__} compiles no function ahead of time")
    compiled, refusal = function.aot_compile(((X,), {})), pytest.raises(RuntimeError, match="policies of polycast")
    assert compiled(X).dtype is torch.float32
    with polycast.autocast("cpu", enabled=False, policy=MM_UP), refusal:
        compiled(X)
    assert compiled(X).dtype is torch.float32


def test_the_key_of_the_cache_on_disk_has_the_policies_and_autocasts_state():
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

    graph = torch.fx.symbolic_trace(square)

    def ours_in_key(policies, dtype=None):
        details = object.__new__(AOTAutogradCacheDetails)
        with polycast.autocast("cpu", dtype=dtype, policy=policies), contextlib.suppress(TypeError):
            details.__init__(graph)  # polycast adds to the key, then calls torch's, which lacks its arguments here
        return vars(details)

    tanh_down = {"tanh": "lower_precision_fp"}
    given = [(None,), (MM_UP,), (dict(MM_UP),), (tanh_down,), (MM_UP, torch.bfloat16)]
    found = [ours_in_key(*each) for each in given]
    assert found[0] == {}
    assert [found.index(key) for key in found] == [0, 1, 1, 3, 1]
    assert ours_in_key(MM_UP, torch.float16) not in found
    with polycast.register_op("aten::sort", "fp32"):
        assert ours_in_key(None) not in found
    assert ours_in_key(None) == {}
