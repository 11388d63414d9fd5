"""Regions with an override or a cache, in the graphs of Dynamo: entered and left where the graph runs.

Dynamo copies four values of a region into its graph. Such a region has a tuple in place of the last, cache_enabled, by
which Dynamo's functions, as changed here, know it: cache_enabled itself; the number by which this process knows the
cache, or 0; the override as a text, or an empty one; and the override's origin. The graph calls a function of
polycast's that enters the region. torch's operators for autocast regions leave it.

Imported when Dynamo traces the making of a region, so programs that compile nothing do not pay for it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx.node import has_side_effect
from typing_extensions import Self

from ..engine import state
from ..engine.casts.cached_cast import thread
from ..engine.casts.cast_cache import caches_alive
from ..engine.installation import install_for
from ..engine.override import Override
from ..engine.state import Settings
from ..torch_internals import changes
from ..torch_internals.patcher import Patch, expect, method_of
from ..torch_internals.private_names import disable_dynamo, enter_autocast
from . import backward
from .torch_autocast import TorchAutocast, UnpatchedAutocast


class region_with_override:
    """A region with an override or a cache, made of constants: for graphs, and for the code after a graph break."""

    def __new__(cls, *values: Any) -> Self:
        """Return a new region; to Dynamo, which traces the code after a break, one that graphs can hold."""
        if is_dynamo_compiling():
            return _entered_again(*values)  # type: ignore[no-any-return]
        return object.__new__(cls)

    def __init__(self, device_type: str, dtype: torch.dtype, enabled: bool, others: tuple[Any, ...]) -> None:
        cache_enabled, cache, override, *origin = others
        found = Override.of_text(device_type, override, *origin) if override else None
        self._settings = Settings(device_type, enabled, dtype, cache_enabled, found, caches_alive.get(cache))

    @disable_dynamo
    def __enter__(self) -> Self:
        if self._settings.ready_key not in state.ready:
            install_for(self._settings)
        state.machine.enter(self, self._settings)
        thread.in_graphs.append(self)
        return self

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        thread.in_graphs.remove(self)
        state.machine.leave(self)


@has_side_effect
def enter_in_a_graph(*values: Any) -> region_with_override:
    """Enter a region in a graph. The graph leaves what this returns as it leaves torch's regions."""
    return region_with_override(*values).__enter__()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _entered_again(device_type: str, dtype: torch.dtype, enabled: bool, others: tuple[Any, ...]) -> Any:
    for feature in (changes.REGIONS_IN_GRAPHS, changes.GRAPHS_ON_DISK):
        feature.make()  # it may have been undone since the code before the break was compiled
    if others[2]:
        backward.mark()
    region: Any = object.__new__(UnpatchedAutocast)
    region.device, region.fast_dtype, region._enabled, region._cache_enabled = device_type, dtype, enabled, others
    return region


def let_graphs_hold_overrides(patch: Patch) -> None:
    """Let Dynamo's graphs enter the regions that have a tuple for cache_enabled."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    enter: Any = method_of(AutocastModeVariable, "enter", "self", "tx")
    module_name: Any = method_of(AutocastModeVariable, "module_name", "self")
    fn_name: Any = method_of(AutocastModeVariable, "fn_name", "self")

    @functools.wraps(enter)
    def enter_ours(self: Any, tx: Any) -> Any:
        if not _is_ours(self.target_values):
            return enter(self, tx)
        region = enter_in_a_graph(*self.target_values)
        self.set_cleanup_hook(tx, lambda: region.__exit__())
        self.proxy = tx.output.create_node("call_function", enter_in_a_graph, (*self.target_values,), {})
        return ConstantVariable.create(None)

    # The class that the code after a graph break makes:
    @functools.wraps(module_name)
    def module_of_ours(self: Any) -> Any:
        return __name__ if _is_ours(self.target_values) else module_name(self)

    @functools.wraps(fn_name)
    def name_of_ours(self: Any) -> Any:
        return region_with_override.__name__ if _is_ours(self.target_values) else fn_name(self)

    patch.replace(AutocastModeVariable, "enter", enter_ours)
    patch.replace(AutocastModeVariable, "module_name", module_of_ours)
    patch.replace(AutocastModeVariable, "fn_name", name_of_ours)
    if "python_type" not in vars(AutocastModeVariable):
        # Dynamo asks what a class's __new__ returns. Later versions of torch answer this, too.
        patch.replace(AutocastModeVariable, "python_type", lambda self: TorchAutocast)


def _is_ours(values: Sequence[Any]) -> bool:
    """Return whether values of a region in a graph are those of :class:`region_with_override`."""
    return isinstance(values[-1], tuple)


def leave_regions_of_failed_graphs(patch: Patch) -> None:
    """Leave the regions of a graph that fails in them, as Dynamo leaves torch's."""
    from torch._dynamo.output_graph import OutputGraph

    call_user_compiler: Any = method_of(OutputGraph, "call_user_compiler", "self")

    @functools.wraps(call_user_compiler)
    def call_user_compiler_and_leave(*args: Any, **kwargs: Any) -> Any:
        before = len(thread.in_graphs)
        try:
            return call_user_compiler(*args, **kwargs)
        finally:
            for region in reversed(thread.in_graphs[before:]):
                region.__exit__()

    patch.replace(OutputGraph, "call_user_compiler", call_user_compiler_and_leave)


def let_graphs_with_regions_be_split(patch: Patch) -> None:
    """Let split_module, which compiles a DistributedDataParallel in parts, repeat these regions in each part."""
    from torch.fx import GraphModule
    from torch.fx.passes import split_module as passes

    split_module: Any = method_of(passes, "split_module", "m")
    expect(enter_autocast is not None, "torch.amp has no _enter_autocast")

    @functools.wraps(split_module)
    def split_module_with_regions(m: GraphModule, *args: Any, **kwargs: Any) -> Any:
        entries = [node for node in m.graph.nodes if node.target is enter_in_a_graph]
        for node in entries:
            node.target = enter_autocast  # the one that it knows
        try:
            split: Any = split_module(m, *args, **kwargs)
        finally:
            for node in entries:
                node.target = enter_in_a_graph
        for part in split.modules() if entries else ():
            if isinstance(part, GraphModule):
                for node in part.graph.nodes:
                    if node.target is enter_autocast and _is_ours(node.args):
                        node.target = enter_in_a_graph
                part.recompile()
        return split

    patch.replace(passes, "split_module", split_module_with_regions)
