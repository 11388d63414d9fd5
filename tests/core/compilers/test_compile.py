"""torch.compile: a region in a graph compiles to the code of torch.autocast."""

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import polycast
from polycast import CastPolicy
from polycast.engine import installation

pytestmark = pytest.mark.usefixtures("engine")


def test_what_a_region_logs_breaks_no_graph(logged):
    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        with polycast.autocast("cpu"):
            return x @ x

    installation.forget_choice()
    assert function(torch.ones(2, 2)).dtype is torch.bfloat16
    assert any("the engine is" in text for _, text in logged.take())


def inside(region):
    def function(x, layer):
        with region("cpu", dtype=torch.bfloat16):
            with region("cpu", dtype=torch.bfloat16, enabled=False):
                z = layer(x)
            y = layer(x)
        return torch.nn.functional.mse_loss(y, z.bfloat16()) + (y.float() @ z.T).sum()

    return function


def from_outside(region):
    held = region("cpu", dtype=torch.bfloat16, cache_enabled=False)

    def function(x, layer):
        with held:
            y = layer(x)
        return layer(y.float()).sum()

    return function


def decorated(region):
    @region("cpu", dtype=torch.bfloat16, cache_enabled=False)
    def function(x, layer):
        return layer(x).relu().sum()

    return function


def decorating_inside(region):
    def function(x, layer):
        @region("cpu", dtype=torch.bfloat16)
        def body(x):
            return layer(x).relu()

        return body(x).sum()

    return function


SHAPES = [inside, from_outside, decorated, decorating_inside]


def outcome(function, x, layer):
    layer.zero_grad()
    loss = function(x, layer)
    loss.backward()
    return loss.detach(), layer.weight.grad.clone(), layer.bias.grad.clone()


def without_comments(code):
    """Return what runs; the comments tell in which line of which file the user wrote it."""
    return [line for line in code.splitlines() if not line.lstrip().startswith("#")]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_graphs_equal_those_of_torch_autocast_and_the_results_those_of_eager_mode(data, shape):
    def graphs(region):
        torch.compiler.reset()
        recorder = AotEagerAndRecordGraphs()
        actual = outcome(torch.compile(shape(region), backend=recorder, fullgraph=True), *data)
        torch.testing.assert_close(actual, outcome(shape(region), *data))
        recorded = [*recorder.graphs, *recorder.fw_graphs, *recorder.bw_graphs]
        assert len(recorded) == 3
        return [without_comments(graph.print_readable(print_output=False)) for graph in recorded]

    assert graphs(polycast.autocast) == graphs(torch.autocast)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # engines trace alike
@pytest.mark.slow
def test_the_code_of_inductor_is_that_of_torch_autocast(data):
    def generated(region):
        torch.compiler.reset()
        compiled = torch.compile(inside(region), fullgraph=True)
        actual, code = run_and_get_code(outcome, compiled, *data)
        torch.testing.assert_close(actual, outcome(inside(region), *data), rtol=1e-2, atol=1e-2)  # bfloat16's
        return actual, [without_comments(text) for text in code]

    with torch._inductor.config.patch(force_disable_caches=True):
        actual, code = generated(polycast.autocast)
        expected, expected_code = generated(torch.autocast)
    assert len(code) == 2  # forward and backward
    assert code == expected_code
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_enclosing_region_applies_and_its_change_recompiles(data, backend):
    x, layer = data
    counter, seen = CompileCounterWithBackend(backend), []
    compiled = torch.compile(lambda x: layer(x), backend=counter, fullgraph=True)
    for _ in range(2):
        with polycast.autocast("cpu"):
            seen.append(compiled(x).dtype)
        with polycast.autocast("cpu", dtype=torch.float16):
            seen.append(compiled(x).dtype)
            with polycast.autocast("cpu", enabled=False):
                seen.append(compiled(x).dtype)
        seen.append(compiled(x).dtype)
    assert seen == 2 * [torch.bfloat16, torch.float16, torch.float32, torch.float32]
    assert counter.frame_count == 3 + (seen[2] is not seen[3])


def compiled_in(*args, **settings):
    """Return a compiled function that calls a layer in a region."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x, layer):
        with polycast.autocast(*args, **settings):
            return layer(x)

    return function


def test_a_region_without_dtype_takes_that_of_the_region_around_at_each_call(data):
    function = compiled_in("cpu")
    seen = [function(*data).dtype]
    for dtype in (torch.float16, torch.bfloat16):
        with polycast.autocast("cpu", dtype=dtype):
            seen.append(function(*data).dtype)
    assert seen == [torch.bfloat16, torch.float16, torch.bfloat16]


def test_a_subclass_is_compiled_as_what_it_stands_for(data):
    class Half(polycast.autocast):
        def __init__(self):
            super().__init__("cpu", dtype=torch.float16)

    def function(x, layer):
        with Half():
            return layer(x)

    assert torch.compile(function, backend="aot_eager", fullgraph=True)(*data).dtype is torch.float16


def test_a_region_below_a_graph_break_is_entered_and_left(data):
    def function(x, layer):
        torch._dynamo.graph_break()
        with polycast.autocast("cpu"):
            y = layer(x)
            torch._dynamo.graph_break()
            return y, torch.mm(x, layer.weight)

    first, second = torch.compile(function, backend="aot_eager")(*data)
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_that_dynamo_leaves_to_the_interpreter_is_entered_and_left(data):
    """Neither the region nor the kernels, which are Python on one of the engines, are compiled by themselves."""

    @torch._dynamo.disable(recursive=False)
    def step(x, layer):
        with polycast.autocast("cpu", dtype=torch.float16):
            return torch.mm(x, layer.weight), polycast.autocast_nesting("cpu")

    result, nesting = torch.compile(lambda *args: step(*args), backend="aot_eager")(*data)
    assert (result.dtype, nesting) == (torch.float16, 1)
    assert not torch.is_autocast_enabled("cpu")


def test_a_disabled_region_warns_while_it_is_compiled(data):
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match="float64 was asked for"):
        assert compiled_in("cpu", dtype=torch.float64)(*data).dtype is torch.float32


def test_a_wrong_device_is_named_while_compiling(data):
    with pytest.raises(RuntimeError, match="Invalid device string: 'not a real device'"):
        compiled_in("not a real device")(*data)


def test_a_user_s_cache_has_no_part_in_a_graph(data):
    cache = polycast.WeightCache()
    held = polycast.autocast("cpu", cache=cache)

    def function(x, layer):
        with polycast.autocast("cpu", cache=cache):
            y = layer(x)
        with held:
            return y, layer(x)

    first, second = torch.compile(function, backend="aot_eager", fullgraph=True)(*data)
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.bfloat16)
    assert cache.stats().entries == 0


def test_the_kernels_have_the_policies_of_the_backend(hand_made):
    """A table unlike torch's."""
    hand_made("cpu", default_dtype=torch.bfloat16, policies={"aten::addmm": CastPolicy.FP32})
    ones = torch.ones(2, 2, dtype=torch.bfloat16)
    assert compiled_in("cpu")(ones, lambda x: torch.addmm(x, x, x)).dtype is torch.float32


@pytest.mark.slow
def test_polycast_does_not_import_dynamo(launch):
    script = """
import sys, polycast
with polycast.autocast("cpu"), polycast.autocast("cpu", policy={"aten::mm": polycast.CastPolicy.FP32}):
    print("torch._dynamo" in sys.modules)
"""
    assert launch(script).stdout == "False\n"
