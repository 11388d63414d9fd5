"""Scripted and traced functions called in eager regions, and tracing in a region, compared with torch.autocast."""

import contextlib

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")

A, B, LOW = torch.rand(2, 2), torch.rand(2, 2), torch.rand(2, 2).bfloat16()
FLOAT, BFLOAT = torch.float32, torch.bfloat16


def several_ops():
    def f(a, b, low):
        x = torch.mm(a, b)
        y = torch.nn.functional.linear(x, a, b[0])
        z = torch.cat([x, a]), torch.addcmul(x, a, b), x + low
        return x, y, torch.exp(x), torch.log(a), torch.softmax(x, 0), x.sum(), z[0], z[1], z[2]

    return f


def in_turn(function, autocast):
    """Return what calls of a function give outside of regions, and in several, one after another."""
    results = []
    for settings in (None, {}, {"dtype": torch.float16}, {"enabled": False}, {}, None):
        with contextlib.nullcontext() if settings is None else autocast("cpu", **settings):
            for _ in range(3):
                results += function(A, B, LOW.float())
    return results


@pytest.mark.parametrize("compiled", ["scripted", "traced"])
def test_a_call_in_a_region_is_as_with_torch(compiled):
    def recompile():
        f = several_ops()
        return torch.jit.script(f) if compiled == "scripted" else torch.jit.trace(f, (A, B, LOW.float()))

    expected = in_turn(recompile(), torch.autocast)
    actual = in_turn(recompile(), polycast.autocast)
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert all(map(torch.equal, actual, expected))
    assert {FLOAT, BFLOAT, torch.float16} == {tensor.dtype for tensor in actual}


def scripted_product():
    def f(a, b):
        return torch.mm(a, b)

    return torch.jit.script(f)


def test_a_decorated_scripted_function_runs_in_the_region():
    decorated = polycast.autocast("cpu")(scripted_product())
    assert [decorated(A, B).dtype for _ in range(3)] == [BFLOAT] * 3
    assert scripted_product()(A, B).dtype is FLOAT


def test_gradients_of_a_scripted_function_equal_torchs():
    def gradients(autocast):
        function = torch.jit.script(several_ops())
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        for _ in range(3):
            a.grad = b.grad = None
            with autocast("cpu"):
                results = function(a, b, LOW)
            sum(result.float().sum() for result in results).backward()
        return a.grad, b.grad

    expected = gradients(torch.autocast)
    assert all(map(torch.equal, gradients(polycast.autocast), expected))


@pytest.fixture
def kernels_alone():
    """Run a test with the JIT's own autocast switched off: the kernels do all of the casting."""
    before = torch._C._jit_set_autocast_mode(False)
    yield
    torch._C._jit_set_autocast_mode(before)


def test_the_jit_casts_by_its_own_list_of_ops_and_knows_no_policy():
    product = polycast.autocast("cpu", policy={"mm": "passthrough"})(scripted_product())
    assert product(A, B).dtype is BFLOAT


def test_a_policy_applies_if_only_the_kernels_cast(kernels_alone):
    product = polycast.autocast("cpu", policy={"mm": "passthrough"})(scripted_product())
    assert product(A, B).dtype is FLOAT


class Convolution(torch.nn.Module):
    def __init__(self, memory_format):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.linear = torch.nn.Linear(8, 4)
        self.to(memory_format=memory_format).eval()

    def forward(self, x):
        x = self.norm(self.convolution(x)).relu()
        return torch.cat([self.linear(x.mean((2, 3))).exp(), x.float().mean((2, 3))], 1)


# In both, in no order: torch's kernels cast the inputs of an op in the order that a C++ compiler chose.


def kinds(graph):
    """Return the kinds of a graph's nodes."""
    return sorted(node.kind() for node in graph.nodes())


def nodes(graph):
    """Return the kinds of a graph's nodes with the types of what they give."""
    return sorted(f"{node.kind()} {[str(output.type()) for output in node.outputs()]}" for node in graph.nodes())


@pytest.fixture(params=[torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def convolution(request):
    """A module, and an input, both in one memory format."""
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=request.param)
    with torch.no_grad():
        yield Convolution(request.param), x


@pytest.mark.parametrize("freeze", [False, True])
def test_a_module_traced_in_a_region_is_as_with_torch(kernels_alone, convolution, freeze):
    module, x = convolution

    def trace(autocast):
        with autocast("cpu", cache_enabled=False):
            traced = torch.jit.trace(module, x)
        traced = torch.jit.freeze(traced) if freeze else traced
        return traced, [traced(x) for _ in range(3)]

    by_torch, expected = trace(torch.autocast)
    by_polycast, actual = trace(polycast.autocast)
    if freeze:
        assert nodes(by_polycast.graph) == nodes(by_torch.graph)
    else:  # the types of modules are numbered by tracing
        assert kinds(by_polycast.inlined_graph) == kinds(by_torch.inlined_graph)
    with polycast.autocast("cpu"):
        eager = module(x)
    assert [result.dtype for result in actual] == [FLOAT] * 3
    assert all(map(torch.equal, actual, expected))
    torch.testing.assert_close(actual[-1], eager, rtol=2e-2, atol=2e-2)


def test_a_module_can_be_traced_in_a_region_with_a_cache(kernels_alone, convolution):
    module, x = convolution
    with polycast.autocast("cpu"):
        module(x)
        traced = torch.jit.trace(module, x)  # none of the cached casts gets into the trace as a constant
    module.convolution.weight.zero_()
    module.convolution.bias.zero_()
    with polycast.autocast("cpu"):
        eager = module(x)
    torch.testing.assert_close(traced(x), eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("freeze", [False, True])
def test_mixed_dtypes_are_promoted_in_a_trace(freeze):
    class Concatenation(torch.nn.Module):
        def forward(self, a, b):
            return torch.cat([a, b])

    def trace(autocast):
        with autocast("cpu", cache_enabled=False), torch.no_grad():
            traced = torch.jit.trace(Concatenation().eval(), (A, LOW))
        return torch.jit.freeze(traced) if freeze else traced

    by_torch, by_polycast = trace(torch.autocast), trace(polycast.autocast)
    assert "aten::to" in str(by_polycast.graph)
    assert nodes(by_polycast.graph) == nodes(by_torch.graph)
    assert [by_polycast(A, LOW).dtype for _ in range(3)] == [FLOAT] * 3
    assert torch.equal(by_polycast(A, LOW), by_torch(A, LOW))
