"""Invalidate cached casts on writes that change no version: the native engine's part in Python.

torch's fused optimizers and collectives write so: C++ hooks these ops, and those that make aliases. Optimizers
of other libraries do too, as their kernels take pointers: a hook of torch.optim runs after each step. torch counts no
versions below the key at which dispatch modes run. And a graph of a device, which has captured a part of the program or
a whole training step, repeats its writes at each replay, without Python. See alias_hooks.h for methods that expose a
weight's memory.
"""

import functools
import operator
import sys
import weakref
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ...torch_internals import changes
from ...torch_internals.builtin_functions import Builtin
from ...torch_internals.patcher import Patch, expect, method_of
from ...torch_internals.private_names import disable_dynamo


def _ops(namespace: str, names: str) -> list[str]:
    return [f"{namespace}::{name}" for name in names.split()]


WRITING_OPS = _ops(
    "aten",
    """
    _amp_foreach_non_finite_check_and_unscale_ _batch_norm_with_update _cudnn_attention_forward_no_dropout_inplace
    _cummax_helper _cummin_helper _flash_attention_forward_no_dropout_inplace
    _fused_adagrad_ _fused_adagrad_.tensor_lr _fused_adam_ _fused_adam_.tensor_lr
    _fused_adamw_ _fused_adamw_.tensor_lr _fused_sgd_ _fused_sgd_.tensor_lr
    _fused_moving_avg_obs_fq_helper _native_batch_norm_legit batch_norm_gather_stats batch_norm_gather_stats_with_counts
    batch_norm_update_stats cudnn_batch_norm kron.out miopen_batch_norm native_batch_norm rrelu_with_noise
    """,
)
"""The ops of torch that write to some of their arguments without changing the version."""

EXPOSING_OPS = _ops(
    "aten",
    """
    _sparse_bsc_tensor_unsafe _sparse_bsr_tensor_unsafe _sparse_compressed_tensor_unsafe
    _sparse_coo_tensor_with_dims_and_tensors _sparse_csc_tensor_unsafe _sparse_csr_tensor_unsafe
    data unsafe_split.Tensor unsafe_split_with_sizes
    set.source_Storage set.source_Storage_storage_offset set.source_Tensor
    set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor
    """,
)
"""The ops of torch that make aliases of their arguments with versions of their own."""

COLLECTIVES = _ops(
    "c10d",
    """
    _allgather_base_ _reduce_scatter_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ allreduce_
    allreduce_coalesced_ alltoall_ alltoall_base_ broadcast_ gather_ recv_ recv_any_source_ reduce_ reduce_scatter_
    reduce_scatter_tensor_coalesced_ scatter_
    """,
) + _ops(
    "_c10d_functional",
    """
    all_gather_into_tensor_out all_reduce_ all_reduce_coalesced_ batch_p2p_ops broadcast_ irecv
    reduce_scatter_tensor_out
    """,
)
"""The ops of torch.distributed that write to their arguments, possibly after they have returned."""

_GRAPHS = (
    ("torch.cuda.graphs", "CUDAGraph"),
    ("torch.xpu.graphs", "XPUGraph"),
    ("torch.mtia.mtia_graph", "MTIAGraph"),
    ("torch.accelerator.graphs", "Graph"),
)


_listener: Any = None
"""The native engine's extension while it watches; binding.cpp has its functions that are called here."""
_handle: RemovableHandle | None = None


def watch(listener: Any) -> None:
    """Install the hooks, and tell the native engine's extension."""
    global _listener, _handle
    _listener = listener
    _handle = register_optimizer_step_post_hook(_after_step)
    changes.WRITES.make()
    changes.COMPILERS_READS.make()


def unwatch() -> None:
    """Uninstall the hooks."""
    global _listener
    if _handle is not None:
        _handle.remove()
    changes.WRITES.undo()
    changes.COMPILERS_READS.undo()
    _listener = None


def _note_writes(tensors: Iterable[torch.Tensor] | None) -> None:
    listener = _listener  # read once, as another thread may uninstall
    if listener is not None:
        listener.note_writes(tensors)


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
            listener = _listener
            if listener is not None:
                listener.forget([tensor])
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
        listener = _listener
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or listener is None:  # other classes may run any code
            return describe_tensor(self, t, *args, **kwargs)
        return listener.read(t, lambda: describe_tensor(self, t, *args, **kwargs))

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


def watch_modes(patch: Patch) -> None:
    """Tell of the dispatch modes that are entered and left, except torch's and polycast's: these write no weights."""
    modes: Any = vars(sys.modules["torch.utils._python_dispatch"])["TorchDispatchMode"]
    enter, leave = method_of(modes, "__enter__", "self"), method_of(modes, "__exit__", "self")

    @functools.wraps(enter)
    @disable_dynamo
    def enter_watched(self: Any) -> Any:
        listener = _listener_to(self)
        if listener is not None:
            listener.enter_mode()
        try:
            return enter(self)
        except BaseException:
            if listener is not None:
                listener.leave_mode()
            raise

    @functools.wraps(leave)
    @disable_dynamo
    def leave_watched(self: Any, *args: Any) -> Any:
        try:
            return leave(self, *args)
        finally:
            listener = _listener_to(self)
            if listener is not None:
                listener.leave_mode()

    patch.replace(modes, "__enter__", enter_watched)
    patch.replace(modes, "__exit__", leave_watched)


def _listener_to(mode: Any) -> Any:
    writes_nothing = type(mode).__module__.partition(".")[0] in ("torch", "polycast", "polycast_plugins")
    return None if writes_nothing or torch.compiler.is_compiling() else _listener


def watch_graphs(patch: Patch) -> None:
    """Tell of captures and replays of graphs. What an earlier graph writes is unknown: its replays drop all casts."""
    for module, name in _GRAPHS:
        graph = getattr(sys.modules.get(module), name, None)
        if graph is not None:
            _watch_graph(patch, graph)


def _watch_graph(patch: Patch, graph: type) -> None:
    begin, end, replay = (method_of(graph, name, "self") for name in ("capture_begin", "capture_end", "replay"))

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        listener = _listener
        self._polycast_capture = None if listener is None else listener.begin_capture()

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        try:
            end(self)
        finally:
            capture = getattr(self, "_polycast_capture", None)
            if capture is not None:
                capture.end()

    @functools.wraps(replay)
    def replay_watched(self: Any) -> None:
        try:
            replay(self)
        finally:
            capture = getattr(self, "_polycast_capture", None)
            if capture is not None:
                capture.note_replay()
            else:
                _note_writes(None)

    for name, hook in (("capture_begin", capture_begin), ("capture_end", capture_end), ("replay", replay_watched)):
        patch.replace(graph, name, hook)
