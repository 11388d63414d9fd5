"""Extend the keys of the caches on disk by what compiled code depends on and torch's own keys leave out.

For AOTAutograd that is the overrides of regions, as a text, with the state that some versions of torch leave out;
whether policies or module rules are in the code itself, which its backward depends on; and whether a region has a
cache, so that casts of weights are an operator of polycast's. Without any of these, the key is torch's own.
"""

import functools
import pickle
from typing import Any

import torch

from ..engine.snapshot import guard_text, overrides_text, snapshot
from ..torch_internals.patcher import Patch, expect, method_of
from . import backward

_MARK = "polycast"
"""An attribute of the objects that keys are hashes of."""
_CODE = 4
"""The version of the code that polycast's operators and regions compile to, and of the choices of the recipe "fastest";
raise it when they change."""


def extend_autograds(patch: Patch) -> None:
    """Extend the keys of AOTAutograd's cache."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

    init: Any = method_of(AOTAutogradCacheDetails, "__init__", "self")
    trial = object.__new__(AOTAutogradCacheDetails)
    setattr(trial, _MARK, "never active")
    expect(b"never active" in pickle.dumps(trial), "the key of the cache is not made of the attributes of its details")

    @functools.wraps(init)
    def init_with_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        regions, inside = snapshot(), backward.is_marked()
        has_cache = any(region.cache is not None for region in regions)
        if overrides_text() or inside or has_cache:
            states = [(region.device_type, region.enabled, str(region.dtype)) for region in regions]
            setattr(self, _MARK, (inside, has_cache, guard_text(), states, _CODE))
        init(self, *args, **kwargs)

    patch.replace(AOTAutogradCacheDetails, "__init__", init_with_ours)


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
