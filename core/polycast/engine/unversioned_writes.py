"""Writes of weights that count no version, and telling the engine of them, so that no cast is kept past one.

torch's fused optimizers write so, and those of other libraries (kernels that are given pointers). Theirs are told by a
hook of torch.optim, after each step; torch's own count versions or run ops that the engine sees, also in compiled code.
Aliases of a weight's memory that count no versions are the engines' to see: alias_hooks.h and alias_hooks.py.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.dlpack
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..torch_internals.names import preserve_version_counter
from .low_bit_kept import forget_all

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
"""The ops of torch.distributed that write into tensors that they are given, maybe after they have returned."""


class PythonHooks:
    """What sees writes where Python code of torch makes them, in place from construction until :meth:`remove`.

    Args:
        note_writes: called with tensors that were written without a version.
        forget: called with tensors whose references in stores are to be dropped.
    """

    def __init__(
        self,
        note_writes: Callable[[Iterable[torch.Tensor]], None],
        forget: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:
        self._note_writes = note_writes
        self._forget = forget
        self._step_hook: RemovableHandle = register_optimizer_step_post_hook(self._after_step)
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        if preserve_version_counter is not None:
            self._replace(preserve_version_counter, "__exit__", self._noting_writes)
        self._replace(torch.utils, "swap_tensors", self._forgetting)
        for owner, name in ((torch.Tensor, "__dlpack__"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack")):
            self._replace(owner, name, _giving_alias)
        _forget_overridable()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or type(optimizer).__module__.startswith("torch.optim."):
            return
        self._note_writes([weight for group in optimizer.param_groups for weight in group["params"]])

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        former = vars(owner).get(name)
        if former is not None:  # else this torch has none
            replacement = functools.wraps(former)(make(former))
            setattr(owner, name, replacement)
            self._replaced.append((owner, name, former, replacement))

    def _noting_writes(self, exit_: Any) -> Any:
        """Return what ends a block that sets the versions of tensors back, and so hides its writes."""

        def exit_and_note(self_: Any, *args: Any) -> None:
            exit_(self_, *args)
            self._note_writes(self_.tensors)

        return exit_and_note

    def _forgetting(self, swap: Any) -> Any:
        """Return what swaps two tensors, which nobody may refer to weakly."""

        def swap_forgotten(t1: torch.Tensor, t2: torch.Tensor) -> None:
            self._forget([t1, t2])
            forget_all()
            swap(t1, t2)

        return swap_forgotten

    def remove(self) -> None:
        """Take the hooks out of torch; what somebody has put over one is left there."""
        self._step_hook.remove()
        for owner, name, former, replacement in self._replaced:
            if vars(owner).get(name) is replacement:
                setattr(owner, name, former)
        self._replaced = []
        _forget_overridable()


def _forget_overridable() -> None:
    """Have torch list the methods of tensors anew, where it has listed them: some are others now."""
    for listed in ("get_testing_overrides", "_get_overridable_functions", "_get_tensor_methods"):
        clear = getattr(getattr(torch.overrides, listed, None), "cache_clear", None)
        if clear is not None:
            clear()


def _giving_alias(export: Any) -> Any:
    """Return what exports a tensor by DLPack as an alias with a counter of its own, for its writes are not counted."""

    def export_alias(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.requires_grad:
            tensor = tensor.data
        return export(tensor, *args, **kwargs)

    return export_alias
