"""Invalidate cached casts on writes that change no version: the part in Python, for both engines.

torch's fused optimizers and collectives write so: the engines hook these ops, and those that make aliases. Optimizers
of other libraries do too, as their kernels take pointers: a hook of torch.optim runs after each step. See
alias_hooks.h and alias_hooks.py for methods that expose a weight's memory, and hidden_ops.py for ops that run where
torch counts no versions, or without Python.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ...torch_internals import changes
from ...torch_internals.builtin_functions import Builtin
from ...torch_internals.patcher import Patch, expect, method_of
from ..disable_dynamo import disable_dynamo
from .hidden_ops import HiddenOps, tell_of_hidden_ops

WRITING_OPS = (
    *(
        f"aten::_fused_{name}_{overload}"
        for name in ("adagrad", "adam", "adamw", "sgd")
        for overload in ("", ".tensor_lr")
    ),
    *(
        f"aten::{name}"
        for name in (
            "_amp_foreach_non_finite_check_and_unscale_",
            "_batch_norm_with_update",
            "_cudnn_attention_forward_no_dropout_inplace",
            "_cummax_helper",
            "_cummin_helper",
            "_flash_attention_forward_no_dropout_inplace",
            "_fused_moving_avg_obs_fq_helper",
            "_native_batch_norm_legit",
            "batch_norm_gather_stats",
            "batch_norm_gather_stats_with_counts",
            "batch_norm_update_stats",
            "cudnn_batch_norm",
            "kron.out",
            "miopen_batch_norm",
            "native_batch_norm",
            "rrelu_with_noise",
        )
    ),
)
"""The ops of torch that write to some of their arguments without changing the version."""

EXPOSING_OPS = tuple(
    f"aten::{name}"
    for name in (
        "_sparse_bsc_tensor_unsafe",
        "_sparse_bsr_tensor_unsafe",
        "_sparse_compressed_tensor_unsafe",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_sparse_csc_tensor_unsafe",
        "_sparse_csr_tensor_unsafe",
        "data",
        *(
            f"{name}.source_{kind}"
            for name in ("set", "set_")
            for kind in ("Storage", "Storage_storage_offset", "Tensor")
        ),
        "unsafe_split.Tensor",
        "unsafe_split_with_sizes",
    )
)
"""The ops of torch that make aliases of their arguments with versions of their own."""

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
        read: is called with a tensor and a function that makes aliases of it, but does not write to them; returns the
            function's result.
        hidden_ops: is told of dispatch modes and graphs.
    """

    def __init__(
        self,
        note_writes: Callable[[Iterable[torch.Tensor] | None], None],
        forget: Callable[[Iterable[torch.Tensor]], None],
        read: Callable[[torch.Tensor, Callable[[], Any]], Any],
        hidden_ops: HiddenOps,
    ) -> None:
        global _note_writes, _forget, _read
        _note_writes, _forget, _read = note_writes, forget, read
        self._handle: RemovableHandle = register_optimizer_step_post_hook(_after_step)
        tell_of_hidden_ops(hidden_ops)
        changes.WRITES.make()
        changes.COMPILERS_READS.make()

    def remove(self) -> None:
        """Uninstall the hooks."""
        global _note_writes, _forget, _read
        self._handle.remove()
        changes.WRITES.undo()
        changes.COMPILERS_READS.undo()
        tell_of_hidden_ops(None)
        _note_writes = _forget = _ignore
        _read = _call


def _ignore(_: Iterable[torch.Tensor] | None) -> None:
    pass


def _call(_: torch.Tensor, function: Callable[[], Any]) -> Any:
    return function()


_note_writes: Callable[[Iterable[torch.Tensor] | None], None] = _ignore
_forget: Callable[[Iterable[torch.Tensor]], None] = _ignore
_read: Callable[[torch.Tensor, Callable[[], Any]], Any] = _call


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or type(optimizer).__module__.startswith("torch.optim."):
        return
    _note_writes([weight for group in optimizer.param_groups for weight in group["params"]])


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
    """Drop the weak references to tensors before they are swapped, which torch refuses otherwise.

    ``swap_tensors`` finds them by the global ``weakref`` of its module. That is replaced, and not the function, which
    may have been imported by name.
    """
    expect("getweakrefs" in torch.utils.swap_tensors.__code__.co_names, "swap_tensors looks for no weak references")

    class ForgettingModule(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(weakref, name)

        def getweakrefs(self, tensor: Any) -> list[Any]:
            _forget([tensor])
            return weakref.getweakrefs(tensor)

    patch.replace(torch.utils, "weakref", ForgettingModule("weakref"))


def export_aliases(patch: Patch) -> None:
    """Let exports by DLPack, and graphs that read ``.data``, use the attribute ``data``, whose hook drops casts."""

    def exporting(export: Any) -> Any:
        def export_alias(*args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
                args = (args[0].data, *args[1:])
            return export(*args, **kwargs)

        return export_alias

    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        builtin = Builtin(getattr(torch._C, name))
        patch.replace(builtin, "replacement", exporting(builtin.original))
    reading = Builtin(vars(torch._C._autograd)["_get_data_attr"])
    patch.replace(reading, "replacement", operator.attrgetter("data"))


def keep_while_described(patch: Patch) -> None:
    """Keep the casts of tensors while the compiler describes them to itself, for which it reads their storages."""
    from torch._subclasses.meta_utils import MetaTensorDescriber

    describe_tensor: Any = method_of(MetaTensorDescriber, "describe_tensor", "self", "t")

    @disable_dynamo  # compiled autograd describes tensors in frames that Dynamo sees
    @functools.wraps(describe_tensor)
    def describe_and_keep(self: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(t) not in (torch.Tensor, torch.nn.Parameter):  # other classes may run any code
            return describe_tensor(self, t, *args, **kwargs)
        return _read(t, lambda: describe_tensor(self, t, *args, **kwargs))

    patch.replace(MetaTensorDescriber, "describe_tensor", describe_and_keep)


def keep_in_first_run(patch: Patch) -> None:
    """Keep the casts of weights in the first run of compiled code, which looks for faults of custom ops.

    For that, it reads ``weight.data`` of the arguments of every op. The ops of torch and polycast have no such faults,
    so they run without it. Others may write anything, and no version changes in the handler of a mode.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    mode: Any = vars(runtime_wrappers).get("_AnalyzeCustomOpInputOutputMode")
    if mode is None:  # a torch that does not look for them
        return
    dispatch: Any = method_of(mode, "__torch_dispatch__", "self", "func", "types", "args", "kwargs")

    @functools.wraps(dispatch)
    def dispatch_known(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not types and getattr(func, "namespace", None) in ("aten", "polycast"):
            return func(*args, **(kwargs or {}))
        try:
            return dispatch(self, func, types, args, kwargs)
        finally:
            _note_writes(None)

    patch.replace(mode, "__torch_dispatch__", dispatch_known)
