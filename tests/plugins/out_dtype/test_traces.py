"""Tracing out_dtype keeps torch's operator."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from polycast import out_dtype

from .int8_matrices import BMM, MM, OPERATOR, int8, same


def function(a, b):
    return out_dtype(MM, torch.int32, a, b) + 1


def batched(a, b):
    return out_dtype(BMM, torch.int32, a, b) + 1


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def exported(strict):
    def trace(function, args):
        module = type("Module", (torch.nn.Module,), {"forward": lambda self, a, b: function(a, b)})()
        return torch.export.export(module, args, strict=strict).module()

    return trace


def compiled(backend):
    def trace(function, args):
        torch._dynamo.reset()
        graphs = []

        def keep(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        call = torch.compile(function, backend=keep, fullgraph=True)
        call(*args)
        call.graph = graphs[0].graph
        return call

    return trace


TRACES = {
    **{
        f"make_fx {mode}{' pre-dispatch' * early}": lambda function, args, mode=mode, early=early: make_fx(
            function, tracing_mode=mode, pre_dispatch=early
        )(*args)
        for mode in ("real", "fake", "symbolic")
        for early in (False, True)
    },
    "functionalize": lambda function, args: make_fx(torch.func.functionalize(function))(*args),
    "symbolic_trace": lambda function, args: torch.fx.symbolic_trace(function),
    "export": exported(strict=False),
    "strict export": exported(strict=True),
    "eager": compiled("eager"),
    "aot_eager": compiled("aot_eager"),
    "inductor": compiled("inductor"),
}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "inductor")) for name in TRACES]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_keeps_the_operator(name):
    traced = TRACES[name](function, (int8(4, 4), int8(4, 4)))
    assert targets(traced.graph)[0] is OPERATOR
    a, b = int8(4, 4), int8(4, 4)
    same(traced(a, b), function(a, b))


@pytest.mark.parametrize("name", [each for each in NAMES if each.values[0] != "symbolic_trace"])
def test_an_op_that_only_a_kernel_supports_is_traced_as_casts_around_it(name):
    args = int8(2, 3, 4), int8(2, 4, 5)
    traced = TRACES[name](batched, args)
    assert OPERATOR not in targets(traced.graph)
    same(traced(*args), batched(*args))


@pytest.mark.slow
def test_the_first_use_may_be_inside_compile(launch):
    script = (
        "import torch, polycast\n"
        "a = torch.ones(2, 2, 2, dtype=torch.int8)\n"
        "f = lambda a: polycast.out_dtype(torch.ops.aten.bmm.default, torch.int32, a, a)\n"
        "print(torch.compile(f, backend='eager', fullgraph=True)(a).unique().tolist())"
    )
    done = launch(script)
    assert done.stdout == "[2]\n", done.stderr
