"""``torch.compiler.nested_compile_region``: a part of a model that is traced once, and used again for parts alike.

What Dynamo has traced it uses for calls of the same code, where the guards hold for these too. Guards are about inputs
and modules. That autocast may have been switched, or have other policies, between two calls in what is being compiled,
torch does not look at: not for regions of torch.autocast either. So to its cache the code is another in another state.

AOTAutograd then traces the part into ops that autocast has dispatched, and runs these, to see what they return, where
autocast is on: it would have its say again, on the ops that other ops are made of. So they run with autocast off. With
gradients, it traces the part once more where it traces the backward, and takes what it finds there for the forward: in
the state of the end of the function, but for what is enabled. So that is traced in the regions of the call.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..engine import state
from ..engine.snapshot import snapshot
from ..engine.state import Settings
from ..torch_internals.dispatcher import disable_autocast
from ..torch_internals.patcher import Patch
from . import backward

_SUBGRAPHS = "torch._higher_order_ops.invoke_subgraph"
_PARAMETERS = ("fn_code", "fn_id")
"""How the methods that are told which code it is name it, in one version of torch or another."""


def key_cache_by_state(patch: Patch) -> None:
    """Have Dynamo's cache of nested regions look them up by the autocast state, too."""
    from torch._guards import InvokeSubgraphCache

    methods = [(name, each) for name, each in vars(InvokeSubgraphCache).items() if inspect.isfunction(each)]
    by_code = [(name, each) for name, each in methods if _is_told_code(each)]
    if not by_code:
        raise NotImplementedError(f"{InvokeSubgraphCache.__name__} has no method that is told which code it is")
    for name, method in by_code:
        patch.replace(InvokeSubgraphCache, name, _by_state(method))


def _is_told_code(method: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(method).parameters)
    return len(parameters) > 1 and parameters[1] in _PARAMETERS


def _by_state(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def method_by_state(self: Any, code: object, *args: Any, **kwargs: Any) -> Any:
        return method(self, (code, snapshot()), *args, **kwargs)

    return method_by_state


class _Thread(threading.local):
    regions: tuple[Settings, ...] = ()
    """Those of the call whose backward this thread is tracing."""


_thread = _Thread()


def trace_again_in_regions(patch: Patch) -> None:
    """Have AOTAutograd trace the backward of a nested region in the regions of the call."""
    module = sys.modules[_SUBGRAPHS]  # in its package, the name means the operator
    op: Any = vars(module)["InvokeSubgraphAutogradOp"]
    forward, its_backward = vars(op)["forward"].__func__, vars(op)["backward"].__func__
    trace = vars(module)["trace_joint_graph_as_bwd"]
    if trace.__name__ not in its_backward.__code__.co_names:
        raise NotImplementedError(f"{its_backward.__qualname__} does not call {trace.__name__}")

    @functools.wraps(forward)
    def forward_that_remembers(ctx: Any, *args: Any) -> Any:
        ctx.polycast_regions = snapshot()
        return forward(ctx, *args)

    @functools.wraps(its_backward)
    def backward_of_a_call(ctx: Any, *grad_outputs: Any) -> Any:
        before, _thread.regions = _thread.regions, ctx.polycast_regions
        try:
            return its_backward(ctx, *grad_outputs)
        finally:
            _thread.regions = before

    @functools.wraps(trace)
    def trace_in_regions(*args: Any, **kwargs: Any) -> Any:
        with _in(_thread.regions), backward.outside_of_regions():
            return trace(*args, **kwargs)

    patch.replace(op, "forward", staticmethod(forward_that_remembers))
    patch.replace(op, "backward", staticmethod(backward_of_a_call))
    patch.replace(module, trace.__name__, trace_in_regions)


def run_traced_without_autocast(patch: Patch) -> None:
    """Have what AOTAutograd has traced run without autocast, to see what it returns."""
    from torch._higher_order_ops import utils

    op: Any = torch.ops.higher_order.invoke_subgraph
    fakes: dict[Any, Any] = dict(utils.registered_hop_fake_fns)
    fake: Any = fakes[op]

    @functools.wraps(fake)
    def fake_of_traced(subgraph: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_traced(subgraph):
            return fake(subgraph, *args, **kwargs)
        with disable_autocast():
            return fake(subgraph, *args, **kwargs)

    patch.replace(utils, "registered_hop_fake_fns", {**fakes, op: fake_of_traced})


def _is_traced(subgraph: Any) -> bool:
    """Say whether a graph is AOTAutograd's, not Dynamo's, whose inputs have their examples by another name."""
    return isinstance(subgraph, torch.fx.GraphModule) and any(
        "val" in node.meta for node in subgraph.graph.find_nodes(op="placeholder")
    )


@contextmanager
def _in(regions: tuple[Settings, ...]) -> Iterator[None]:
    owner = object()
    entered = 0
    try:
        for settings in regions:
            state.machine.enter(owner, settings)
            entered += 1
        yield
    finally:
        for _ in range(entered):
            state.machine.leave(owner)
