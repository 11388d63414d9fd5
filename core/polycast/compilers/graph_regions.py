"""Regions with an override or a cache, in the graphs of Dynamo: entered and left where the graph runs.

The graph calls a function of polycast's that enters the region, with the override as a text, and the cache as the
number by which this process knows it. torch's operators for autocast regions leave it.

Imported when Dynamo traces the making of a region, so programs that compile nothing do not pay for it.
"""

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx.node import has_side_effect
from typing_extensions import Self

from ..engine import state
from ..engine.casts.cached_cast import enter_in_graph, leave_in_graph
from ..engine.casts.cast_cache import cache_by_identity
from ..engine.installation import install_for
from ..engine.override import Override
from ..engine.state import Settings
from ..torch_internals import changes
from ..torch_internals.patcher import Patch, expect, method_of
from ..torch_internals.private_names import disable_dynamo, enter_autocast
from . import backward
from .torch_autocast import TorchAutocast, UnpatchedAutocast

_ARGUMENTS_OF_TORCH = 4
"""The arguments of ``torch.amp._enter_autocast``; `enter_in_a_graph` has more."""


class CacheEnabledWithOverride(NamedTuple):
    """The cache_enabled of a region with an override or a cache, as Dynamo passes it to where the region is entered."""

    cache_enabled: bool | None
    override_arguments: tuple[Any, ...]
    """The other arguments of :class:`region_with_override`."""


class region_with_override:
    """A region with an override or a cache, made of constants: for graphs, and for the code after a graph break."""

    def __new__(cls, *values: Any) -> Self:
        """Return a new region; to Dynamo, which traces the code after a break, one that graphs can hold."""
        if is_dynamo_compiling():
            return _entered_again(*values)  # type: ignore[no-any-return]
        return object.__new__(cls)

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        enabled: bool,
        cache_enabled: bool | None,
        cache: int,
        override: str,
        *origin: str,
    ) -> None:
        found = Override.of_text(device_type, override, *origin) if override else None
        self._settings = Settings(device_type, enabled, dtype, cache_enabled, found, cache_by_identity(cache))

    @disable_dynamo
    def __enter__(self) -> Self:
        if self._settings.ready_key not in state.ready:
            install_for(self._settings)
        state.machine.enter(self, self._settings)
        enter_in_graph(self._settings.cache)
        _thread.entered.append(self)
        return self

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        _thread.entered.remove(self)
        leave_in_graph(self._settings.cache)
        state.machine.leave(self)


@has_side_effect
def enter_in_a_graph(*values: Any) -> region_with_override:
    """Enter a region in a graph. The graph leaves what this returns as it leaves torch's regions."""
    return region_with_override(*values).__enter__()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _entered_again(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None, *override_arguments: Any
) -> Any:
    for feature in (changes.REGIONS_IN_GRAPHS, changes.GRAPHS_ON_DISK):
        feature.make()  # it may have been undone since the code before the break was compiled
    if override_arguments[1]:
        backward.mark()
    region: Any = object.__new__(UnpatchedAutocast)
    region.device, region.fast_dtype, region._enabled = device_type, dtype, enabled
    region._cache_enabled = CacheEnabledWithOverride(cache_enabled, override_arguments)
    return region


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[region_with_override] = []
        """This thread's open regions of graphs."""


_thread = _Thread()


def let_graphs_hold_overrides(patch: Patch) -> None:
    """Let Dynamo's graphs hold the regions whose cache_enabled is a :class:`CacheEnabledWithOverride`."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    init: Any = method_of(AutocastModeVariable, "__init__", "self", "target_values")

    class RegionWithOverrideVariable(AutocastModeVariable):
        """A region with an override or a cache, to Dynamo."""

        def enter(self, tx: Any) -> Any:
            region = enter_in_a_graph(*self.target_values)
            self.set_cleanup_hook(tx, lambda: region.__exit__())
            self.proxy = tx.output.create_node("call_function", enter_in_a_graph, (*self.target_values,), {})
            return ConstantVariable.create(None)

        def module_name(self) -> str:
            return __name__

        def fn_name(self) -> str:
            return region_with_override.__name__

    @functools.wraps(init)
    def init_with_override(self: Any, target_values: Any, *args: Any, **kwargs: Any) -> None:
        init(self, target_values, *args, **kwargs)
        *values, last = target_values
        if isinstance(last, CacheEnabledWithOverride):
            # Dynamo calls the class itself, at two places, one of which is deep in a function: only __init__ sees both.
            self.__class__ = RegionWithOverrideVariable
            self.target_values = [*values, last.cache_enabled, *last.override_arguments]

    patch.replace(AutocastModeVariable, "__init__", init_with_override)
    if "python_type" not in vars(AutocastModeVariable):
        # Dynamo asks what a class's __new__ returns. Later versions of torch answer this, too.
        patch.replace(AutocastModeVariable, "python_type", lambda self: TorchAutocast)


def leave_regions_of_failed_graphs(patch: Patch) -> None:
    """Leave the regions of a graph that fails in them, as Dynamo leaves torch's."""
    from torch._dynamo.output_graph import OutputGraph

    call_user_compiler: Any = method_of(OutputGraph, "call_user_compiler", "self")

    @functools.wraps(call_user_compiler)
    def call_user_compiler_and_leave(*args: Any, **kwargs: Any) -> Any:
        before = len(_thread.entered)
        try:
            return call_user_compiler(*args, **kwargs)
        finally:
            for region in reversed(_thread.entered[before:]):
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
            node.target = enter_autocast  # the one that it knows; the arguments tell them apart
        try:
            split: Any = split_module(m, *args, **kwargs)
        finally:
            for node in entries:
                node.target = enter_in_a_graph
        if entries:
            parts = [each for each in split.modules() if isinstance(each, GraphModule)]
            for part in parts:
                _restore_entries(part)
        return split

    patch.replace(passes, "split_module", split_module_with_regions)


def _restore_entries(part: Any) -> None:
    for node in part.graph.nodes:
        if node.target is enter_autocast and len(node.args) > _ARGUMENTS_OF_TORCH:
            node.target = enter_in_a_graph
    part.recompile()
