"""Extend the keys of compilers' caches on disk by what compiled code depends on and torch's own keys leave out.

For AOTAutograd that is the overrides of regions, as a text, with the state that some versions of torch leave out; the
policies that are registered for single ops, or that extensions add; whether policies or module rules are in the code
itself, which its backward depends on; and whether a region has a cache, so that casts of weights are an operator of
polycast's. Without any of these, the key is torch's own. The regions in a graph are in torch's key, as code with
constant arguments.
"""

import functools
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from ..engine.snapshot import overrides_text, snapshot
from ..policy.cast_policy import registrations
from ..registry.registry import registry
from ..torch_internals.patcher import Patch, expect, method_of
from ..torch_internals.private_names import enter_autocast, exit_autocast
from . import backward
from .graph_regions import enter_in_a_graph

_MARK = "polycast"
"""An attribute of the objects that keys are hashes of."""
_CODE = 6
"""The version of the code that polycast's operators and regions compile to, and of the choices of the recipe "fastest";
raise it when they change."""


def extend_autograds(patch: Patch) -> None:
    """Extend the keys of AOTAutograd's cache."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

    init: Any = method_of(AOTAutogradCacheDetails, "__init__", "self", "gm")
    trial = object.__new__(AOTAutogradCacheDetails)
    setattr(trial, _MARK, "never active")
    expect(b"never active" in pickle.dumps(trial), "the key of the cache is not made of the attributes of its details")

    @functools.wraps(init)
    def init_with_ours(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        regions = snapshot()
        inside = backward.is_marked() or bool(gm.graph.find_nodes(op="call_function", target=enter_in_a_graph))
        has_cache = any(region.cache is not None for region in regions)
        registered = sorted((str(each.device_type), *each.ops, each.policy.name) for each in registrations)
        registered += sorted(_added())
        if overrides_text() or inside or has_cache or registered:
            states = [(region.device_type, region.enabled, str(region.dtype)) for region in regions]
            setattr(self, _MARK, (inside, has_cache, overrides_text(with_caches=True), states, registered, _CODE))
        init(self, gm, *args, **kwargs)

    patch.replace(AOTAutogradCacheDetails, "__init__", init_with_ours)


def _added() -> Iterator[tuple[str, ...]]:
    """Yield the device, the op and the policy of each policy that an extension adds."""
    for device_type, backend in registry.ready.copy().items():
        for op, added in registry.added_policies(backend).items():
            yield device_type, op, added.policy.name


def cache_graphs_with_regions(patch: Patch) -> None:
    """Let AOTAutograd cache graphs with regions, as later versions of torch do for their own regions."""
    from torch._functorch._aot_autograd import autograd_cache

    check_node_safe: Any = method_of(autograd_cache, "check_node_safe", "node")
    functions = (enter_autocast, exit_autocast, enter_in_a_graph)

    @functools.wraps(check_node_safe)
    def check_node_safe_but_regions(node: torch.fx.Node) -> None:
        if node.op != "call_function" or node.target not in functions:
            check_node_safe(node)

    patch.replace(autograd_cache, "check_node_safe", check_node_safe_but_regions)


def extend_inductors(patch: Patch) -> None:
    """Extend the keys of inductor's cache."""
    from torch._inductor.codecache import FxGraphHashDetails

    init: Any = method_of(FxGraphHashDetails, "__init__", "self", "gm")

    @functools.wraps(init)
    def init_with_ours(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        if gm.graph.find_nodes(op="call_function", target=torch.ops.polycast.cached_cast.default):
            setattr(self, _MARK, _CODE)
        init(self, gm, *args, **kwargs)

    patch.replace(FxGraphHashDetails, "__init__", init_with_ours)
