"""Invalidate cached casts on writes that change no version: the part in Python, for both engines.

torch's fused optimizers write so, and collectives: the engines hook these ops. So do optimizers of other libraries,
whose kernels take pointers: a hook of torch.optim runs after each step. See alias_hooks.h and alias_hooks.py for
aliases of a weight's memory, and hidden_ops.py for ops that run where torch counts no versions, or without Python.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.dlpack
from torch.autograd import grad_mode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ...torch_internals import changes
from ...torch_internals.patcher import Patch, method_of
from .hidden_ops import HiddenOps, tell_of_hidden_ops

FUSED_OPTIMIZERS = tuple(
    f"aten::_fused_{name}_{overload}" for name in ("adagrad", "adam", "adamw", "sgd") for overload in ("", ".tensor_lr")
)
"""The ops of torch's fused optimizers."""

COLLECTIVES = (
    *(
        f"c10d::{name}"
        for name in (
            "_allgather_base_",
            "_reduce_scatter_base_",
            "allgather_",
            "allgather_coalesced_",
            "allgather_into_tensor_coalesced_",
            "allreduce_",
            "allreduce_coalesced_",
            "alltoall_",
            "alltoall_base_",
            "broadcast_",
            "gather_",
            "recv_",
            "recv_any_source_",
            "reduce_",
            "reduce_scatter_",
            "reduce_scatter_tensor_coalesced_",
            "scatter_",
        )
    ),
    *(
        f"_c10d_functional::{name}"
        for name in (
            "all_gather_into_tensor_out",
            "all_reduce_",
            "all_reduce_coalesced_",
            "batch_p2p_ops",
            "broadcast_",
            "irecv",
            "reduce_scatter_tensor_out",
        )
    ),
)
"""The ops of torch.distributed that write to their arguments, possibly after they have returned."""


class WatchedWrites:
    """The hooks, installed from construction until :meth:`remove`.

    Args:
        note_writes: is called with tensors that were written without a new version.
        forget: is called with tensors whose entries, and references to them, are to be dropped.
        hidden_ops: is told of dispatch modes and graphs.
    """

    def __init__(
        self,
        note_writes: Callable[[Iterable[torch.Tensor]], None],
        forget: Callable[[Iterable[torch.Tensor]], None],
        hidden_ops: HiddenOps,
    ) -> None:
        global _note_writes, _forget
        _note_writes, _forget = note_writes, forget
        self._handle: RemovableHandle = register_optimizer_step_post_hook(_after_step)
        tell_of_hidden_ops(hidden_ops)
        changes.make(changes.WRITES)
        _clear_method_lists()

    def remove(self) -> None:
        """Uninstall the hooks."""
        global _note_writes, _forget
        self._handle.remove()
        changes.undo(changes.WRITES)
        tell_of_hidden_ops(None)
        _clear_method_lists()
        _note_writes = _forget = _ignore


def _ignore(_: Iterable[torch.Tensor]) -> None:
    pass


_note_writes: Callable[[Iterable[torch.Tensor]], None] = _ignore
_forget: Callable[[Iterable[torch.Tensor]], None] = _ignore


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or type(optimizer).__module__.startswith("torch.optim."):
        return
    _note_writes([weight for group in optimizer.param_groups for weight in group["params"]])


def _clear_method_lists() -> None:
    """Clear torch's lists of the methods of tensors, some of which were replaced."""
    for name in ("get_testing_overrides", "_get_overridable_functions", "_get_tensor_methods"):
        clear = getattr(getattr(torch.overrides, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def note_hidden_writes(patch: Patch) -> None:
    """Note writes when a block ends that resets the versions of its tensors."""
    block: Any = vars(grad_mode)["_unsafe_preserve_version_counter"]
    exit_ = method_of(block, "__exit__", "self")

    @functools.wraps(exit_)
    def exit_and_note(self: Any, *args: Any) -> None:
        exit_(self, *args)
        _note_writes(self.tensors)

    patch.replace(block, "__exit__", exit_and_note)


def forget_swapped(patch: Patch) -> None:
    """Drop the weak references to tensors before they are swapped, which torch refuses otherwise."""
    swap_tensors = torch.utils.swap_tensors

    @functools.wraps(swap_tensors)
    def swap_forgotten(t1: torch.Tensor, t2: torch.Tensor) -> None:
        _forget([t1, t2])
        swap_tensors(t1, t2)  # type: ignore[no-untyped-call]

    patch.replace(torch.utils, "swap_tensors", swap_forgotten)


def export_aliases(patch: Patch) -> None:
    """Export tensors by DLPack as aliases through ``.data``, whose hook invalidates casts."""

    def exporting(export: Any) -> Any:
        @functools.wraps(export)
        def export_alias(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.requires_grad:
                tensor = tensor.data
            return export(tensor, *args, **kwargs)

        return export_alias

    for owner, name in ((torch.Tensor, "__dlpack__"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack")):
        if name in vars(owner):  # not every torch has the last one
            patch.replace(owner, name, exporting(vars(owner)[name]))
