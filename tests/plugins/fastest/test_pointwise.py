"""Functions of one number in regions with recipe "fastest": by kernels of the backend, with the results of torch's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.plugins.modes import Seen
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import autocast
from polycast_plugins.quantize.cpu.few_rows import few_rows_availability

AVAILABLE = few_rows_availability()
pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason=f"no kernels here: {AVAILABLE.reason}"),
    pytest.mark.usefixtures("engine"),
]
FUNCTIONS = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


@pytest.fixture
def x():
    """Return numbers in bfloat16, enough for kernels of the backend."""
    torch.manual_seed(0)
    return torch.randn(160, 128).bfloat16()


@pytest.fixture
def computed(recipe_counts):
    with recipe_counts() as counts:
        yield counts


def fastest(**options):
    return autocast("cpu", recipe="fastest", **options)


def test_results_are_those_of_torch(function, x):
    expected = function(x)
    with torch.no_grad(), fastest():
        for _ in range(3):
            assert torch.equal(function(x), expected)


def test_the_backend_computes_them(function, x, computed):
    with torch.no_grad(), fastest():
        function(x)
    (record,) = computed.records()
    assert (record.recipe, record.declined, record.calls) == ("fastest:bfloat16 kernel", "", 1)
    assert record.op.startswith("aten::")


@pytest.mark.parametrize(
    "given",
    [lambda x: x.float(), lambda x: x.double(), lambda x: x.half(), lambda x: x[:4], lambda x: x[:, ::2]],
    ids=["float32", "float64", "float16", "few", "not dense"],
)
def test_others_are_left_to_torch_as_they_are(given, x, computed):
    given = given(x)
    expected = F.silu(given)
    with torch.no_grad(), fastest():
        for _ in range(2):
            result = F.silu(given)
            assert result.dtype is given.dtype
            assert torch.equal(result, expected)
    assert not computed  # torch's op is no fall back


def test_float16_regions(x, computed):
    x = x.half()
    expected = F.silu(x)
    with torch.no_grad(), autocast("cpu", torch.float16, recipe="fastest"):
        assert torch.equal(F.silu(x), expected)
    assert computed == {("cpu", "fastest:float16 kernel", "aten::silu", ""): 1}


def test_a_policy_for_an_op_goes_before_the_recipe(x, computed):
    with torch.no_grad(), fastest(policy={"silu": "fp32"}):
        assert F.silu(x).dtype is torch.float32
        assert torch.tanh(x).dtype is torch.bfloat16
    registered = polycast.register_op("silu", "fp32", device_type="cpu")
    try:
        with torch.no_grad(), fastest():
            assert F.silu(x).dtype is torch.float32
    finally:
        registered.remove()
    assert [record.op for record in computed.records()] == ["aten::tanh"]


def test_the_recipe_names_its_ops(x, computed):
    with torch.no_grad(), autocast("cpu", recipe=polycast.Fastest(ops=("linear",))):
        F.silu(x)
    with torch.no_grad(), autocast("cpu", recipe=polycast.Fastest(ops=("silu",))):
        F.silu(x)
    with torch.no_grad(), fastest(), autocast("cpu", recipe="none"):
        F.silu(x)
    assert [record.op for record in computed.records()] == ["aten::silu"]


def test_regions_without_the_recipe_pass_them_on(function, x, computed):
    with fastest(), torch.no_grad():
        function(x)
    computed.clear()
    for given in (x, x.float(), x[:, ::3]):
        expected = function(given)
        with autocast("cpu"):
            result = function(given)
        assert result.dtype is given.dtype
        assert torch.equal(result, expected)
        assert torch.equal(function(given), expected)
    assert not computed


def step(function, x, region):
    """Return a result and the gradient of its sum of squares."""
    leaf = x.clone().requires_grad_()
    with region:
        result = function(leaf * 1)
    return result, *torch.autograd.grad(result.float().square().sum(), leaf)


def test_training(function, x, computed):
    expected = step(function, x, torch.autocast("cpu", enabled=False))
    for _ in range(3):
        result, gradient = step(function, x, fastest())
        assert torch.equal(result, expected[0])
        # Each is rounded once, from numbers that are computed in another order.
        torch.testing.assert_close(gradient, expected[1], rtol=2**-7, atol=1e-5)
    assert "fastest:bfloat16 kernel" in {record.recipe for record in computed.records()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_with_checkpoints(function, x, reentrant):
    leaf = x.clone().requires_grad_()
    with fastest():
        result = checkpoint(function, leaf * 1, use_reentrant=reentrant)
    result.float().square().sum().backward()
    assert torch.equal(leaf.grad, step(function, x, fastest())[1])


def test_a_hook_sees_the_fast_dtype_also_beside_a_copy_of_the_model(x):
    model, hooked = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)), []
    other = copy.deepcopy(model)
    other[1] = nn.Identity()
    model[1].register_forward_hook(lambda module, args, out: hooked.append((args[0], out)))
    with torch.no_grad(), fastest():
        model(x.float())
        other(x.float())
    ((given, out),) = hooked
    assert given.dtype is out.dtype is torch.bfloat16
    assert torch.equal(out, F.gelu(given))


def test_forward_mode_and_transforms(function, x):
    tangent = torch.ones_like(x)
    expected = torch.func.jvp(function, (x,), (tangent,))
    each = torch.func.vmap(function)(x)
    gradient = torch.func.grad(lambda x: function(x).sum())(x)
    with fastest():
        function(x)
        found = torch.func.jvp(function, (x,), (tangent,))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(torch.func.vmap(function)(x), each)
        assert torch.equal(torch.func.grad(lambda x: function(x).sum())(x), gradient)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            result, change = torch.autograd.forward_ad.unpack_dual(function(dual))
        assert torch.equal(result, expected[0])
        assert torch.equal(change, expected[1])


def test_negated_views_and_zeros_without_memory(function, x):
    zeros = torch._efficientzerotensor(x.shape, dtype=x.dtype)
    expected, of_zeros = function(-x), function(torch.zeros_like(x))
    leaf = x.clone().requires_grad_()
    with fastest():
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(function(torch._neg_view(x)), expected)
                assert torch.equal(function(zeros).clone(), of_zeros)
            assert torch.equal(function(torch._neg_view(leaf)), expected)


def test_a_parameter_in_the_fast_dtype_in_a_region_with_a_cache(function, x):
    parameter, cache = nn.Parameter(x.clone()), polycast.WeightCache()
    for _ in range(2):
        with torch.no_grad(), fastest(cache=cache):
            assert torch.equal(function(parameter), function(parameter.detach().clone()))
            parameter.add_(1)
    with fastest(cache=cache):
        result = function(parameter)
    result.sum().backward()
    assert parameter.grad.dtype is torch.bfloat16


def test_a_float32_dtype_that_is_set_inside_of_a_region(x):
    with torch.no_grad(), fastest():
        torch.set_autocast_dtype("cpu", torch.float32)
        result = F.silu(x.float())
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert torch.equal(result, F.silu(x.float()))


def test_modes_and_subclasses_see_the_op_of_torch(function, x):
    with torch.no_grad(), fastest():
        function(x)
        with Seen() as seen:
            function(x)
    assert [op.namespace for op in seen.ops] == ["aten"]


def test_compiled_code_has_the_op_of_torch(function, x, fresh_dynamo):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend)
    def run(x):
        with fastest():
            return function(x)

    expected = function(x)
    assert torch.equal(run(x), expected)
    assert not any("lookup" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_explain(x):
    with fastest():
        text = str(polycast.explain("gelu", x, device_type="cpu"))
        other = str(polycast.explain("gelu", x.float(), device_type="cpu"))
    assert "the recipe fastest computes it in bfloat16 kernel: the backend's kernel has the same results" in text
    assert "its input is not in the fast dtype" in other
