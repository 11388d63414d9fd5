"""Graphs with regions that are split into parts, as those of a DistributedDataParallel are."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.passes import split_module as passes

import polycast

pytestmark = pytest.mark.usefixtures("engine")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))

    def forward(self, x):
        with polycast.autocast("cpu", policy={"linear": "fp32"}):
            y = x @ x.T
            x = self.layers(x)
        return y, x, x @ x.T


def split(gm, inputs):
    """Compile a graph in two parts, at its second linear layer."""
    linears = [node for node in gm.graph.nodes if node.target is torch._C._nn.linear]
    nodes = list(gm.graph.nodes)
    border = nodes.index(linears[1])
    parts = passes.split_module(gm, None, lambda node: int(nodes.index(node) >= border))
    assert len(list(parts.children())) == 2
    return parts


def test_each_part_is_in_the_region():
    model, x = Model().requires_grad_(False), torch.randn(4, 1024)
    with polycast.autocast("cpu"):
        expected = model(x)
        compiled = torch.compile(model, backend=split, fullgraph=True)(x)
    assert [each.dtype for each in expected] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert all(map(torch.equal, compiled, expected))
    assert polycast.autocast_nesting("cpu") == 0


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_a_distributed_data_parallel_is_compiled_in_parts():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model())
        x = torch.randn(4, 1024)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))
    finally:
        dist.destroy_process_group()
