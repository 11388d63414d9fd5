"""Support autocast in ``torch.compiler.nested_compile_region``, which traces a part of a model once for many calls.

Dynamo reuses the trace for calls of the same code whose guards hold. The guards cover inputs and modules, but not the
autocast state, which may change between two calls in one compiled function (torch.autocast has this defect, too). So
the cache is keyed by the state as well.

AOTAutograd traces the part into ops that autocast has already dispatched. It then runs the trace, with autocast on, to
find the shapes and dtypes of the results; autocast would apply a second time, to ops that were decomposed. So they run
with autocast off. For gradients, AOTAutograd traces the part again while it traces the backward, and uses that trace
for the forward too. The dtype and overrides would be those at the end of the function, so that trace runs in the
regions of the call.
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
from ..torch_internals.patcher import Patch, expect
from . import backward

_SUBGRAPHS = "torch._higher_order_ops.invoke_subgraph"


def key_cache_by_state(patch: Patch) -> None:
    """Key Dynamo's cache of nested regions by the autocast state, too."""
    from torch._guards import InvokeSubgraphCache

    methods = [(name, each) for name, each in vars(InvokeSubgraphCache).items() if inspect.isfunction(each)]
    # Versions of torch name the parameter for the code differently.
    of_code = (["self", "fn_code"], ["self", "fn_id"])
    by_code = [(name, each) for name, each in methods if [*inspect.signature(each).parameters][:2] in of_code]
    expect(bool(by_code), f"{InvokeSubgraphCache.__name__} has no method that takes the code")
    for name, method in by_code:
        patch.replace(InvokeSubgraphCache, name, _by_state(method))


def _by_state(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def method_by_state(self: Any, code: object, *args: Any, **kwargs: Any) -> Any:
        return method(self, (code, snapshot()), *args, **kwargs)

    return method_by_state


class _Thread(threading.local):
    regions: tuple[Settings, ...] = ()
    """The regions of the call whose backward this thread is tracing."""


_thread = _Thread()


def trace_again_in_regions(patch: Patch) -> None:
    """Make AOTAutograd trace the backward of a nested region in the regions of the call."""
    module = sys.modules[_SUBGRAPHS]  # in its package, the name means the operator
    op: Any = vars(module)["InvokeSubgraphAutogradOp"]
    forward, its_backward = vars(op)["forward"].__func__, vars(op)["backward"].__func__
    trace = vars(module)["trace_joint_graph_as_bwd"]
    calls = its_backward.__code__.co_names
    expect(trace.__name__ in calls, f"{its_backward.__qualname__} does not call {trace.__name__}")

    @functools.wraps(forward)
    def forward_saving_regions(ctx: Any, *args: Any) -> Any:
        ctx.polycast_regions = snapshot()
        return forward(ctx, *args)

    @functools.wraps(its_backward)
    def backward_in_regions(ctx: Any, *grad_outputs: Any) -> Any:
        before, _thread.regions = _thread.regions, ctx.polycast_regions
        try:
            return its_backward(ctx, *grad_outputs)
        finally:
            _thread.regions = before

    @functools.wraps(trace)
    def trace_in_regions(*args: Any, **kwargs: Any) -> Any:
        with _entered(_thread.regions), backward.backward_without_autocast():
            return trace(*args, **kwargs)

    patch.replace(op, "forward", staticmethod(forward_saving_regions))
    patch.replace(op, "backward", staticmethod(backward_in_regions))
    patch.replace(module, trace.__name__, trace_in_regions)


def run_traced_without_autocast(patch: Patch) -> None:
    """Run graphs of AOTAutograd without autocast, when it runs them to see what they return."""
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
    """Return whether a graph is AOTAutograd's; Dynamo keeps the examples of its inputs by another name."""
    return isinstance(subgraph, torch.fx.GraphModule) and any(
        "val" in node.meta for node in subgraph.graph.find_nodes(op="placeholder")
    )


@contextmanager
def _entered(regions: tuple[Settings, ...]) -> Iterator[None]:
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
