"""Keep compiled code and its callers from writing to cached casts, whose memory belongs to the cache.

A caller may write to what compiled code returns, and autograd gives the result its own version counter, so graphs
return copies of cached casts. Inductor reuses the buffers that it made and nothing else uses, so it is told which
buffers are cached casts, including those that a subgraph returns to the graph around it for the backward.
"""

import functools
from typing import Any

import torch

from ..torch_internals.dispatcher import disable_autocast
from ..torch_internals.patcher import Patch, method_of

_CACHED = "polycast_cached_casts"
"""An attribute of inductor's graphs: the names of their cached casts."""


def keep_from_callers(patch: Patch) -> None:
    """Make graphs return copies of cached casts."""
    from torch._functorch._aot_autograd import graph_capture

    create_graph: Any = vars(graph_capture)["_create_graph"]

    @functools.wraps(create_graph)
    def create_graph_with_copies(*args: Any, **kwargs: Any) -> Any:
        traced = create_graph(*args, **kwargs)
        for module in traced.modules():  # including those that operators such as torch.cond run
            if isinstance(module, torch.fx.GraphModule) and _copy_cached(module.graph):
                module.recompile()
        return traced

    patch.replace(graph_capture, "_create_graph", create_graph_with_copies)


def _copy_cached(graph: torch.fx.Graph) -> bool:
    """Make a graph return copies of cached casts, and views of the copies for views; return whether it returned any."""
    op, clone = torch.ops.polycast.cached_cast.default, torch.ops.aten.clone.default
    cached = dict.fromkeys(graph.find_nodes(op="call_function", target=op))
    memory = {_storage_of(node.meta["val"]) for node in cached}
    for node in graph.nodes:
        if node.op == "call_function" and any(each in cached for each in node.all_input_nodes):
            value = node.meta.get("val")
            is_view = _storage_of(value) in memory if isinstance(value, torch.Tensor) else True  # or several views
            if is_view:
                cached[node] = None
    output = graph.output_node()
    given = [node for node in output.all_input_nodes if node in cached]

    @functools.cache
    def copy_of(node: torch.fx.Node) -> torch.fx.Node:
        if node.target is op:
            copy = graph.call_function(clone, (node,))
        else:
            copy = graph.node_copy(node, lambda each: copy_of(each) if each in cached else each)
        args, kwargs = torch.fx.map_arg((copy.args, copy.kwargs), lambda each: each.meta["val"])
        target: Any = copy.target
        copy.meta = {**node.meta, "val": target(*args, **kwargs)}
        return copy

    with graph.inserting_before(output), disable_autocast():
        for node in given:
            output.replace_input_with(node, copy_of(node))
    return bool(given)


def _storage_of(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def keep_from_inductor(patch: Patch) -> None:
    """Keep inductor from writing to the memory of cached casts."""
    from torch._inductor import ir, lowering
    from torch._inductor.graph import GraphLowering, SubgraphLowering
    from torch._inductor.virtualized import V

    op = torch.ops.polycast.cached_cast.default
    fall_back = lowering.fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]
    output: Any = method_of(GraphLowering, "output", "self", "target", "args", "kwargs")

    def cached(*args: Any, **kwargs: Any) -> Any:
        cast = fall_back(*args, **kwargs)
        name = cast.get_name()
        V.graph.never_reuse_buffers.add(name)
        vars(V.graph).setdefault(_CACHED, set()).add(name)
        return cast

    def copied(value: Any) -> Any:
        if not isinstance(value, ir.TensorBox) or not ir.is_storage_and_layout(value):
            return value
        name = ir.as_storage_and_layout(value, freeze=False)[0].get_name()
        return lowering.clone(value) if name in vars(V.graph)[_CACHED] else value

    @functools.wraps(output)
    def output_copies(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        # The graph around a subgraph takes its outputs for its own, and writes to them if nothing else uses them.
        if _CACHED in vars(self) and isinstance(self, SubgraphLowering) and isinstance(args[0], (tuple, list)):
            args = (type(args[0])(map(copied, args[0])), *args[1:])
        return output(self, target, args, kwargs)

    patch.replace(GraphLowering, "output", output_copies)
    patch.replace_item(lowering.lowerings, op, cached)
