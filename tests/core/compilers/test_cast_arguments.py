"""Writes of a module under the rule "fp32" to its arguments, in compiled code."""

import importlib
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs

import polycast
from polycast import Policy
from polycast.compilers import casts_in_graphs

BACKENDS = ["eager", "aot_eager", "inductor"]


class Cached(nn.Module):
    def forward(self, x, cache, seen):
        cache["k"][:, 1] = x
        seen.append(x)
        seen.append(x * 2)
        x.relu_()
        return cache["k"].sum(1)


class Around(nn.Module):
    """Gives a module under the rule "fp32" what the code has computed, and returns that and what the module returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        polycast.apply_policy(self, Policy(modules={"inner": "fp32"}))

    def forward(self, x, *others):
        h = x * 1
        y = self.inner(h, *others)
        return h, y


def results(model):
    x = torch.tensor([[-1.0, 2.0]], dtype=torch.bfloat16)
    cache, seen = OrderedDict(k=torch.zeros(1, 3, 2, dtype=torch.bfloat16)), [torch.ones(1, dtype=torch.bfloat16)]
    k, first = cache["k"], seen[0]
    with polycast.autocast("cpu"):
        h, y = model(x, cache, seen)
    assert cache["k"] is k
    assert seen[0] is first
    return [(each.dtype, each.tolist()) for each in (h, y, k, *seen, x)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
def test_compiled_in_one_graph_a_model_writes_what_the_interpreted_one_writes(backend, mode, dynamic):
    model = Around(Cached())
    with mode():
        expected = results(model)
        assert expected[0] == (torch.bfloat16, [[0, 2]])
        assert expected[2] == (torch.bfloat16, [[[0, 0], [-1, 2], [0, 0]]])
        assert results(torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_a_written_argument_equal_those_of_eager_mode(backend):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0, 4.0]))

        def forward(self, h):
            h.mul_(self.w)
            with torch.no_grad():
                h[1].fill_(8)

    model = Around(Scale())

    def gradients(function):
        model.zero_grad()
        x = torch.tensor([3.0, 5.0], dtype=torch.bfloat16, requires_grad=True)
        with polycast.autocast("cpu"):
            y, _ = function(x)
        y.float().sum().backward()
        return y.tolist(), x.grad.tolist(), model.inner.w.grad.tolist()

    assert gradients(model) == ([6, 8], [2, 4], [3, 5])
    assert gradients(torch.compile(model, backend=backend, fullgraph=True)) == gradients(model)


def test_a_module_that_writes_nothing_leaves_nothing_to_write_in_the_graph():
    class Reads(nn.Module):
        def forward(self, x, items):
            return x.sin() + items[0]

    module, graphs = Reads(), EagerAndRecordGraphs()
    polycast.apply_policy(module, Policy(modules={"": "fp32"}))
    x = torch.ones(2, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x, items: module(x, items), backend=graphs, fullgraph=True)
    with polycast.autocast("cpu"):
        assert compiled(x, [x]).dtype is torch.float32
    targets = [str(node.target) for node in graphs.graphs[0].graph.nodes]
    assert (targets.count("copy_"), targets.count("to"), x._version) == (0, 1, 0)


def test_other_lists_and_tensors_are_no_reason_to_compile_again():
    counter = CompileCounter()
    compiled = torch.compile(Around(Cached()), backend=counter, fullgraph=True)
    for _ in range(3):
        results(compiled)
    assert counter.frame_count == 1


@pytest.fixture
def without_comptime(monkeypatch):
    """Run a test with a Dynamo that lacks the function that shows what it traces."""
    with monkeypatch.context() as lacking:
        lacking.delattr("torch._dynamo.comptime.comptime")
        importlib.reload(casts_in_graphs)
    yield
    importlib.reload(casts_in_graphs)


def test_a_torch_that_does_not_show_what_it_traces_runs_the_module_in_the_interpreter(without_comptime):
    model = Around(Cached())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)not known\. Dynamo of this torch.*Give the module"):
        results(torch.compile(model, backend="eager", fullgraph=True))
    assert results(torch.compile(model, backend="eager")) == results(model)


def test_writes_of_a_module_with_a_graph_break_reach_the_argument():
    class Breaks(nn.Module):
        def forward(self, x, items):
            x.add_(1)
            torch._dynamo.graph_break()
            items[0].mul_(2)
            items.append(x)

    x, item = torch.ones(2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    items = [item]
    with polycast.autocast("cpu"):
        y, _ = torch.compile(Around(Breaks()), backend="aot_eager")(x, items)
        assert y.tolist() == [2, 2]
    assert items[0] is item
    assert (item.tolist(), items[1].tolist()) == ([2], [2, 2])


@pytest.mark.parametrize("disjoint", [True, False])
def test_views_of_one_tensor_are_written_to_where_they_do_not_overlap(disjoint):
    class Writes(nn.Module):
        def forward(self, q, k):
            q.mul_(2)
            return k + 1

    module = Writes()
    polycast.apply_policy(module, Policy(modules={"": "fp32"}))

    def f(x):
        h = x * 1
        module(h[:, :2], h[:, 2:] if disjoint else h[:, 1:])
        return h

    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with polycast.autocast("cpu"), torch.no_grad():
        if disjoint:
            assert torch.compile(f, backend="aot_eager", fullgraph=True)(x).tolist() == [[2, 2, 1, 1]] * 2
        else:
            with pytest.raises(RuntimeError, match="it shares memory with another argument that was cast"):
                torch.compile(f, backend="aot_eager")(x)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_writes_to_its_inputs(strict):
    model = nn.Sequential(nn.ReLU(inplace=True))
    polycast.apply_policy(model, Policy(modules={"0": "fp32"}))
    with polycast.autocast("cpu"):
        program = torch.export.export(model, (torch.ones(2, dtype=torch.bfloat16),), strict=strict)
        x = torch.tensor([-1.0, 3.0], dtype=torch.bfloat16)
        program.module()(x)
    assert x.tolist() == [0, 3]
