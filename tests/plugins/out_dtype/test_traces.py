"""Tracing out_dtype keeps torch's operator."""

import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from polycast import out_dtype

from .int8_matrices import BMM, MM, OPERATOR, int8, same


def function(a, b):
    return out_dtype(MM, torch.int32, a, b) + 1


def batched(a, b):
    return out_dtype(BMM, torch.int32, a, b) + 1


class Module(torch.nn.Module):
    def forward(self, a, b):
        return function(a, b)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_keeps_the_operator(mode, pre_dispatch):
    traced = make_fx(function, tracing_mode=mode, pre_dispatch=pre_dispatch)(int8(4, 4), int8(4, 4))
    assert targets(traced.graph)[:1] == [OPERATOR]
    a, b = int8(4, 4), int8(4, 4)
    same(traced(a, b), function(a, b))


def test_functionalize_keeps_the_operator():
    a, b = int8(4, 4), int8(4, 4)
    traced = make_fx(torch.func.functionalize(function))(a, b)
    assert targets(traced.graph)[0] is OPERATOR
    same(torch.func.functionalize(function)(a, b), function(a, b))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(strict):
    a, b = int8(4, 4), int8(4, 4)
    exported = torch.export.export(Module(), (a, b), strict=strict)
    assert OPERATOR in targets(exported.graph)
    same(exported.module()(a, b), function(a, b))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_keeps_the_operator(backend):
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    a, b = int8(4, 4), int8(4, 4)
    same(torch.compile(function, backend=keep, fullgraph=True)(a, b), function(a, b))
    assert targets(graphs[0].graph)[0] is OPERATOR


def test_symbolic_trace_keeps_the_operator():
    assert targets(torch.fx.symbolic_trace(function).graph)[0] is OPERATOR


@pytest.mark.parametrize(
    "trace",
    ["make_fx", "export", "strict export", "eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_an_op_that_only_a_kernel_supports_is_traced_as_casts_around_it(trace):
    torch._dynamo.reset()
    args = (int8(2, 3, 4), int8(2, 4, 5))
    if trace == "make_fx":
        traced = make_fx(batched)(*args)
        assert BMM in targets(traced.graph)
    elif "export" in trace:
        module = type("Batched", (torch.nn.Module,), {"forward": lambda self, a, b: batched(a, b)})()
        traced = torch.export.export(module, args, strict=trace == "strict export").module()
    else:
        traced = torch.compile(batched, backend=trace, fullgraph=True)
    same(traced(*args), batched(*args))


@pytest.mark.slow
def test_the_first_use_may_be_inside_compile():
    script = (
        "import torch, polycast\n"
        "a = torch.ones(2, 2, 2, dtype=torch.int8)\n"
        "f = lambda a: polycast.out_dtype(torch.ops.aten.bmm.default, torch.int32, a, a)\n"
        "print(torch.compile(f, backend='eager', fullgraph=True)(a).unique().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[2]\n", done.stderr
