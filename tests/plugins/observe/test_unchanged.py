"""Observing changes no result, cast, graph or compiled code."""

import pytest
import torch
import torch._dynamo.testing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.plugins.quantize.conftest import int8_operators  # noqa: F401  # a fixture
from tests.plugins.quantize.int8_linears import X, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2))


def test_number_of_casts_is_the_same(engine, in_thread):
    """Told by torch's own profiler, which sees all in an observed block too; a thread remembers what it cast before."""

    def copies(observed):
        net, x = model(), torch.ones(1, 8)
        observer = polycast.observe(net) if observed else torch.no_grad()
        with torch.autograd.profiler.profile() as profile, observer, torch.no_grad(), polycast.autocast("cpu"):
            net(x)
            net(x)
        return {event.key: event.count for event in profile.key_averages() if event.key.startswith("aten::")}

    in_thread(lambda: copies(observed=False))  # what regions keep depends on the largest cast that the process has made
    assert in_thread(lambda: copies(observed=True)) == in_thread(lambda: copies(observed=False))


def test_observed_tensors_are_not_held(engine):
    with polycast.observe(nonfinite="record"), polycast.autocast("cpu"):
        x = torch.ones(4, 4)
        storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
        torch.mm(x, x)
        del x
        assert storage.expired()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_code_is_the_same_and_counted(engine, fullgraph):
    counter = torch._dynamo.testing.CompileCounter()
    net, x = model(), torch.ones(4, 8)
    compiled = torch.compile(net, backend=counter, fullgraph=fullgraph)
    seen = []
    for observed in (True, False, True):
        with torch.no_grad(), polycast.observe(net) if observed else torch.no_grad() as each:
            compiled(x)
        seen.append(each)
    assert counter.frame_count == 1
    for each in (seen[0], seen[2]):
        assert [code.calls for code in each.compiled] == [1]
        assert each.compiled[0].region.startswith("Torch-Compiled Region")
    torch._dynamo.reset()


def test_ops_of_the_compiler_are_not_counted(engine, fresh_dynamo):
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    compiled = torch.compile(net, backend="aot_eager")
    counted = []
    for _ in range(2):
        with torch.no_grad(), polycast.observe() as seen, polycast.autocast("cpu"):
            compiled(x)
        counted.append({(op.op, op.calls) for op in seen.ops})
    assert counted[0] == counted[1]


def test_exported_graph_is_the_same_and_not_counted(engine):
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    plain = torch.export.export(net, (x,)).graph_module.code
    with polycast.observe(net) as seen:
        observed = torch.export.export(net, (x,)).graph_module.code
    assert observed == plain
    assert "aten::relu" not in {op.op for op in seen.ops}


def test_traced_module_is_the_same(engine):
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    plain = str(torch.fx.symbolic_trace(net).graph)
    with polycast.observe(net) as seen:
        assert str(torch.fx.symbolic_trace(net).graph) == plain
        net(x)
    assert [module.entries for module in seen.modules] == [1, 1, 1]
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "norm": lambda: nn.LayerNorm(8),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
    "dropout": nn.Dropout,
    "inplace": lambda: nn.ReLU(inplace=True),
}
OF_ALL_KINDS = {
    "layers": ["linear", "norm", "gelu", "linear", "softmax", "linear"],
    "policy": None,
    "checkpoints": False,
    "grad": True,
}


def graph(node):
    return None if node is None else (node.name(), tuple(graph(each) for each, _ in node.next_functions))


def left_by(run, layers, policy, caches, checkpoints, grad):
    """Return all that a run leaves: outputs, graphs, gradients or errors, the generator's state and the cache's."""
    torch.manual_seed(0)
    net = nn.Sequential(*(LAYERS[layer]() for layer in layers))
    cache = polycast.WeightCache() if caches else None
    found = []

    def forward(x):
        return net(x * 1)  # which may be written to

    def step():
        x = torch.randn(2, 3, 8, requires_grad=True)
        with polycast.autocast("cpu", policy=policy, cache=cache):
            y = checkpoint(forward, x, use_reentrant=False) if checkpoints else forward(x)
        found.extend([y.detach(), graph(y.grad_fn)])
        if grad:
            y.float().square().sum().backward()
            found.extend([x.grad, *(parameter.grad.clone() for parameter in net.parameters())])

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if list(net.parameters()) else None
    with run(net), torch.set_grad_enabled(grad):
        for _ in range(2):
            try:
                step()
            except RuntimeError as error:  # what was saved for the backward was written in place
                found.append(str(error))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    stats = None if cache is None else cache.stats()
    return [*found, torch.get_rng_state(), stats, torch.is_autocast_enabled("cpu"), nn.Module.__call__]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    policy=st.sampled_from([None, {"softmax": "lower_precision_fp"}, {"linear": "fp32"}]),
    caches=st.booleans(),
    checkpoints=st.booleans(),
    grad=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "timing": st.booleans(),
            "stacks": st.booleans(),
            "numerics": st.booleans(),
            "nonfinite": st.sampled_from(["ignore", "record", "raise"]),
            "threads": st.sampled_from(["this", "all"]),
        }
    ),
)
@example(layers=["inplace", "inplace"], policy=None, caches=False, checkpoints=False, grad=True, options={})
@example(options={"timing": True, "stacks": True, "numerics": True}, caches=True, **OF_ALL_KINDS)
@example(options={"nonfinite": "record", "threads": "all"}, caches=False, **OF_ALL_KINDS)
def test_observed_run_has_the_same_results(engine, layers, policy, caches, checkpoints, grad, options):
    arguments = layers, policy, caches, checkpoints, grad
    plain = left_by(lambda net: torch.enable_grad(), *arguments)
    observed = left_by(lambda net: polycast.observe(net, **options), *arguments)
    assert len(plain) == len(observed)
    for one, other in zip(plain, observed, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.usefixtures("int8_operators", "no_grad")
def test_python_is_asked_for_each_call_by_a_recipe(engine, asked):
    layer = nn.Linear(8, 8).requires_grad_(False)
    run(layer, X)
    before = len(asked)
    for count in (1, 2):
        with polycast.observe():
            run(layer, X)
        assert len(asked) - before >= count
    count = len(asked)
    run(layer, X)  # observing has made the engine forget
    assert len(asked) - count == 1
    run(layer, X)
    assert len(asked) - count == 1


def test_casts_of_an_encoder_layer_that_a_region_uses_again_are_cached(engine, no_grad):
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(3, 7, 16)
    with polycast.autocast("cpu"):
        for _ in range(3):
            module(x)
        with polycast.observe() as seen:
            module(x)
    assert sum(each.hits for each in seen.casts) >= 2  # at least the two linears between the norms
    with polycast.autocast("cpu"), polycast.observe() as seen:
        module(x)
    assert sum(each.hits for each in seen.casts) == 0
