"""CUDA graphs for the tests."""

import torch


def captured_call(net, x, region):
    """Call a module in a region, then capture another call; return the graph and its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), region:
        net(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), region:
        output = net(x)
    return graph, output
