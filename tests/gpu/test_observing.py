"""Observing an asynchronous device, which records graphs. Needs a CUDA device."""

import pytest
import torch

import polycast

pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.parametrize("engine", ["native"], indirect=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def train(model, x):
    with polycast.autocast("cuda"):
        loss = model(x).float().square().mean()
    loss.backward()


def test_ops_of_both_passes_are_counted_by_module():
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda(), torch.ones(8, 64, device="cuda")
    with polycast.observe(model, timing=True) as seen:
        train(model, x)
    linear = next(op for op in seen.ops if op.op == "aten::linear")
    assert (linear.policy, linear.output_dtypes) == ("lower_precision_fp", {"float16": 1})
    (module,) = [each for each in seen.modules if each.module == "0"]
    assert {op.phase for op in module.ops} == {"forward", "backward"}


def test_inf_on_the_device_is_found():
    with polycast.observe(nonfinite="record") as seen:
        torch.zeros(4, device="cuda").log()
    assert (seen.nonfinite.op, seen.nonfinite.what) == ("aten::log", "inf")


def test_graph_can_be_recorded_while_outputs_are_checked():
    x, graph = torch.ones(8, 8, device="cuda"), torch.cuda.CUDAGraph()
    torch.mm(x, x)
    with polycast.observe(nonfinite="record"), torch.cuda.graph(graph):
        y = torch.mm(x, x)
    graph.replay()
    assert y[0, 0] == 8
