"""Writes of weights that count no version, and telling the engine of them, so that no cast is kept past one.

torch's fused optimizers write so, and those of other libraries (kernels that are given pointers). Theirs are told by a
hook of torch.optim, after each step; torch's own count versions or run ops that the engine sees, also in compiled code.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

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


class WatchedOptimizers:
    """The hook, in place from construction until :meth:`remove`."""

    def __init__(self, note_writes: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self._note_writes = note_writes
        self._handle: RemovableHandle = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or type(optimizer).__module__.startswith("torch.optim."):
            return
        self._note_writes([weight for group in optimizer.param_groups for weight in group["params"]])

    def remove(self) -> None:
        """Take the hook back."""
        self._handle.remove()
