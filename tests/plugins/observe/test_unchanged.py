"""Observing changes no cast, graph or compiled code; test_unchanged_property.py has the results."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn

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


def test_ops_of_the_compiler_are_not_counted(engine):
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad(), polycast.observe() as first, polycast.autocast("cpu"):
        compiled(x)
    with torch.no_grad(), polycast.observe() as second, polycast.autocast("cpu"):
        compiled(x)
    assert {(op.op, op.calls) for op in first.ops} == {(op.op, op.calls) for op in second.ops}
    torch._dynamo.reset()


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
