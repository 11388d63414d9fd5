"""The private names of torch that are read: no other module of the core names them.

Each has what stands in where a torch lacks it, so that a plain region computes what it should, and a text that says
what is lost. :func:`warn_of_missing` says it once in a process, when the first engine is chosen.

What stands in errs on the safe side: where it cannot know whether a cast may be kept, it says no.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.autograd import forward_ad

from ..errors import warn_user

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef as CustomOpDef
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
else:
    OpOverload = type(torch.ops.aten.mm.default)
    OpOverloadPacket = type(torch.ops.aten.mm)

_T = TypeVar("_T")

READ: dict[str, str] = {}
"""By name, what users lose without it."""
missing: dict[str, str] = {}
"""Those of them that this torch lacks."""
_warned = False


def find(name: str) -> Any:
    """Return what a dotted name of torch means, importing its module.

    Raises:
        ImportError, AttributeError: this torch has no such module, or no such name in it.
    """
    where, _, attribute = name.rpartition(".")
    try:
        owner = sys.modules[where]
    except KeyError:
        try:
            owner = importlib.import_module(where)
        except ModuleNotFoundError:
            owner = find(where)  # what has it is no module, or one of C++ that no import finds
    return getattr(owner, attribute)


def _read(name: str, otherwise: _T, lost: str) -> _T:
    """Return what a name means, or what stands in for it."""
    READ[name] = lost
    try:
        found: _T = find(name)
    except (AttributeError, ImportError):
        missing[name] = lost
        return otherwise
    return found


def warn_of_missing() -> None:
    """Warn of what this torch lacks and what is lost with it, once in a process."""
    global _warned
    if missing and not _warned:
        _warned = True
        lost = "; ".join(f"without {name}: {what}" for name, what in missing.items())
        warn_user(
            f"This torch ({torch.__version__}) lacks internals that polycast reads ({lost}). Regions work. Use a torch "
            "that polycast supports, or a polycast that supports this torch."
        )


class _Nobody:
    """A class that has no instances."""


if not TYPE_CHECKING:
    CustomOpDef = _read(
        "torch._library.custom_ops.CustomOpDef", _Nobody, "ops are not known by what torch.library.custom_op returned"
    )

# ---- Devices and the dispatcher.

DispatchKeySet: TypeAlias = Any
_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")
_OF_TABLES = ("CPU", "CUDA", "XPU", "MPS", "MTIA", "MAIA")

is_autocast_available: Callable[[str], bool] = torch.amp.autocast_mode.is_autocast_available
"""torch's own, also while torch is patched."""

autocast_supported_devices: Callable[[], list[str]] = _read(
    "torch._C._autocast_supported_devices",
    lambda: [name for name in _DEVICES if is_autocast_available(name)],
    "regions of out-of-tree devices are not captured for other threads and checkpoints",
)
privateuse1_name: Callable[[], str] = _read(
    "torch._C._get_privateuse1_backend_name",
    lambda: "privateuseone",
    "`polycast new-backend` does not know whether a device is named",
)
dispatch_key_for_device: Callable[[str], str] = _read(
    "torch._C._dispatch_key_for_device",
    lambda device_type: device_type.upper() if device_type in _DEVICES else "PrivateUse1",
    "devices are known by polycast's own list",
)
_parse_dispatch_key: Callable[[str], Any] = _read(
    "torch._C._parse_dispatch_key",
    lambda name: getattr(torch._C.DispatchKey, name, None),
    "dispatch keys are known by their enumeration, which lacks some",
)
_has_fallback: Callable[[Any], bool] | None = _read(
    "torch._C._dispatch_has_backend_fallback",
    None,
    "which devices torch has tables for is known by polycast's own list",
)


def dispatch_key(name: str) -> Any:
    """Return a dispatch key by its name; None where this torch does not tell it."""
    return _parse_dispatch_key(name)


def has_backend_fallback(name: str) -> bool:
    """Return whether a dispatch key has a kernel for ops that have none there."""
    key = dispatch_key(name)
    if _has_fallback is None or key is None:
        return name.removeprefix("Autocast") in _OF_TABLES
    return _has_fallback(key)


def python_kernels(op: OpOverload) -> dict[Any, Any]:
    """Return the kernels in Python that torch keeps with an op, by dispatch key."""
    kernels: dict[Any, Any] = getattr(op, "py_kernels", {})
    return kernels


def clear_dispatch_cache(op: OpOverload) -> None:
    """Have an op's kernels looked up again where Python dispatches it."""
    cache = getattr(op, "_dispatch_cache", None)
    if cache is not None:
        cache.clear()


has_kernel_for_dispatch_key: Callable[[str, str], bool] = _read(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    lambda op, key: False,
    "drift, explanations and observations do not know which ops torch itself autocasts",
)
has_kernel: Callable[[str], bool] = _read(
    "torch._C._dispatch_has_kernel",
    lambda op: True,
    "regions that wait for ops of other libraries are entered more slowly",
)
all_op_names: Callable[[], Sequence[str]] = _read(
    "torch._C._dispatch_get_all_op_names",
    lambda: (),
    "unknown names of ops are refused without the nearest one, and drift knows no ops of torch's",
)


def _schema_by_packet(qualified: str, overload: str) -> None:
    namespace, _, base = qualified.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), base, None)
    if not isinstance(packet, OpOverloadPacket) or (overload or "default") not in packet.overloads():  # type: ignore[no-untyped-call]
        raise RuntimeError(f"no schema {qualified}.{overload}")


find_schema_or_throw: Callable[[str, str], object] = _read(
    "torch._C._dispatch_find_schema_or_throw",
    _schema_by_packet,
    "ops are looked up more slowly",
)
resolve_packet: Callable[..., str] | None = _read(
    "torch._C._jit_resolve_packet",
    None,
    "polycast.explain must be given the overload of an op that has several",
)
_exclude_set: Callable[[], Any] | None = _read(
    "torch._C._dispatch_tls_local_exclude_set",
    None,
    "modules under rules are called more slowly",
)


def excluded_keys() -> int:
    """Return a number that differs where other dispatch keys of autocast are excluded on this thread."""
    if _exclude_set is not None:
        number: int = _exclude_set().raw_repr()
        return number
    return sum(torch.is_autocast_enabled(name) << place for place, name in enumerate(autocast_supported_devices()))


_include_set: Callable[[], Any] | None = _read(
    "torch._C._dispatch_tls_local_include_set", None, "compiled recipes leave views of weights out"
)
_ForceKeys: Any = _read("torch._C._ForceDispatchKeyGuard", None, "compiled recipes leave views of weights out")


def noting_views() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which autograd notes what a view is of, also below its key, in compiled code."""
    key = dispatch_key("ADInplaceOrView")
    if key is None or _exclude_set is None or _include_set is None or _ForceKeys is None:
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = _ForceKeys(_include_set(), _exclude_set().remove(key))
    return guard


_full_after: Callable[[Any], DispatchKeySet] | None = _read(
    "torch._C._dispatch_keyset_full_after",
    None,
    "on the reference engine, ops that other regions' policies name are not autocast inside, and fused optimizers and "
    "collectives are not seen to write weights",
)
_KeySet: Callable[[Any], DispatchKeySet] | None = _read(
    "torch._C.DispatchKeySet", None, "the reference engine is slower"
)
_ExcludeKeys: Any = _read("torch._C._ExcludeDispatchKeyGuard", None, "the reference engine is slower")


def keys_below(name: str) -> DispatchKeySet | None:
    """Return the dispatch keys below one; None where this torch does not tell them."""
    key = dispatch_key(name)
    return None if key is None or _full_after is None else _full_after(key)


@functools.cache
def _positions_of_tensors(op: OpOverload) -> tuple[int, ...]:
    arguments = op._schema.arguments
    return tuple([at for at, argument in enumerate(arguments) if str(argument.real_type) == "Tensor"])


def redispatch(op: OpOverload, keys: DispatchKeySet, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an op with the kernel of the highest of `keys`.

    A Python kernel gets the 2 of ``x * 2`` as a number, which ``OpOverload.redispatch`` takes for no Tensor. What calls
    the kernel of a single key makes it the tensor that it was, one that does not promote.
    """
    if all(isinstance(args[at], torch.Tensor) for at in _positions_of_tensors(op) if at < len(args)):
        return op.redispatch(keys, *args, **kwargs)
    return op._op_dk(keys.highestPriorityTypeId(), *args, **kwargs)


@contextlib.contextmanager
def _switched_off(device_types: Sequence[str]) -> Iterator[None]:
    switched = [name for name in device_types if torch.is_autocast_enabled(name)]
    for name in switched:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name in switched:
            torch.set_autocast_enabled(name, True)


def excluding(name: str, device_type: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what makes a context manager that excludes the Autocast key of a device, by its name."""
    key = dispatch_key(name)
    if key is None or _KeySet is None or _ExcludeKeys is None:
        return lambda: _switched_off((device_type,))
    keys = _KeySet(key)
    return lambda: _ExcludeKeys(keys)


disable_autocast: Callable[[], contextlib.AbstractContextManager[Any]] = _read(
    "torch._C._DisableAutocast",
    lambda: _switched_off(autocast_supported_devices()),
    "autocast is switched off more slowly",
)
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] | None = _read(
    "torch._C._AutoDispatchBelowAutograd",
    None,
    "compiled training casts the weights of a WeightCache at each call",
)
is_any_autocast_enabled: Callable[[], bool] = _read(
    "torch._C._is_any_autocast_enabled",
    lambda: any(map(torch.is_autocast_enabled, autocast_supported_devices())),
    "polycast.out_dtype is slower",
)

# ---- What records, transforms or watches ops.

_IS_NOT_SEEN = "whether ops are transformed is not known: the reference engine keeps no casts, recipes compute nothing"

dispatch_mode_count: Callable[[], int] = _read("torch._C._len_torch_dispatch_stack", lambda: 1, _IS_NOT_SEEN)


def _jit_is_tracing() -> object | None:
    return True if torch.jit.is_tracing() else None  # type: ignore[attr-defined, no-untyped-call]


tracing_state: Callable[[], object | None] = _read(
    "torch._C._get_tracing_state", _jit_is_tracing, "whether ops are traced is told more slowly"
)
are_functorch_transforms_active: Callable[[], bool] = _read(
    "torch._C._are_functorch_transforms_active", lambda: True, _IS_NOT_SEEN
)
_WRITES_UNDER_FUNCTORCH = "rules lose what modules under torch.func write to arguments that are cast"
is_functorch_wrapped: Callable[[torch.Tensor], bool] = _read(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False, _WRITES_UNDER_FUNCTORCH
)
functorch_unwrapped: Callable[[torch.Tensor], torch.Tensor] | None = _read(
    "torch._C._functorch.get_unwrapped", None, _WRITES_UNDER_FUNCTORCH
)
_NO_LEVEL = object()
_has_level = _read("torch.autograd.forward_ad._current_level", _NO_LEVEL, _IS_NOT_SEEN) is not _NO_LEVEL


def is_forward_ad_active() -> bool:
    """Return whether gradients are computed in forward mode."""
    return not _has_level or forward_ad._current_level >= 0


is_function_mode_enabled: Callable[[], bool] = _read(
    "torch._C._is_torch_function_mode_enabled", lambda: True, "regions are entered more slowly"
)
function_modes: Callable[[], list[Any]] = _read(
    "torch.overrides._get_current_function_mode_stack",
    lambda: [],
    "torch.export(strict=False) leaves out the regions of a model",
)
enter_autocast: Callable[..., Any] | None = _read(
    "torch.amp.autocast_mode._enter_autocast", None, "torch.export(strict=False) refuses models with regions"
)
exit_autocast: Callable[..., Any] | None = _read(
    "torch.amp.autocast_mode._exit_autocast", None, "torch.export(strict=False) refuses models with regions"
)
disable_current_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _read(
    "torch.utils._python_dispatch._disable_current_modes",
    contextlib.nullcontext,
    "a recipe cannot be used for the first time while ops are traced",
)
_dispatch_keys: Callable[[torch.Tensor], Any] | None = _read(
    "torch._C._dispatch_keys", None, "recipes leave subclasses of tensors out"
)


def has_python_key(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's ops are seen by Python."""
    return _dispatch_keys is None or bool(_dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


_KEEPS_NONE = "compiled code casts the weights of a WeightCache at each call"

is_functional_tensor: Callable[[torch.Tensor], bool] = _read(
    "torch._is_functional_tensor", lambda tensor: False, "recipes compute nothing in compiled code"
)
_from_functional_tensor: Callable[[torch.Tensor], torch.Tensor] = _read(
    "torch._from_functional_tensor", lambda tensor: tensor, _KEEPS_NONE
)


def behind_functional_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what AOTAutograd's stand-in for a tensor stands for; None where a tensor is no such stand-in."""
    elem = getattr(tensor, "elem", None)
    if not isinstance(elem, torch.Tensor) or not is_functional_tensor(elem):
        return None
    return _from_functional_tensor(elem)


# ---- Autograd.

is_fwd_grad_enabled: Callable[[], bool] = _read(
    "torch._C._is_fwd_grad_enabled", lambda: False, "recipes compute under torch.inference_mode() only"
)
current_graph_task_id: Callable[[], int] = _read(
    "torch._C._current_graph_task_id", lambda: 0, "recipes compute under torch.inference_mode() only"
)
tensor_base: Any = _read(
    "torch._C.TensorBase", torch.Tensor.__base__, "nothing: it is found as the base of torch.Tensor"
)
without_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = _read(
    "torch._C.DisableTorchFunction", contextlib.nullcontext, "modes of torch functions see how memory is looked at"
)
has_storage: Callable[[torch.Tensor], bool] = _read(
    "torch._C._has_storage",
    lambda tensor: tensor.layout is torch.strided,
    "on the reference engine, whether a tensor has memory is told by its layout",
)
storage_use_count: Callable[[int], int] = _read(
    "torch._C._storage_Use_Count",
    lambda storage: sys.maxsize,
    "on the reference engine, casts are not kept between processes of torch.distributed",
)


class _Raises(torch.autograd.Function):
    """Has a backward that raises."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, message: str) -> torch.Tensor:
        ctx.message = message
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(ctx.message)


delayed_error: Callable[[str, int], Callable[[torch.Tensor], torch.Tensor]] = _read(
    "torch._C._functions.DelayedError",
    lambda message, count: lambda tensor: _Raises.apply(tensor, message),  # type: ignore[no-untyped-call]
    "the backward of polycast.out_dtype raises from Python",
)

# ---- Compilers.


class _NoContext:
    @staticmethod
    def try_get() -> None:
        return None


_TracingContext: Any = _read(
    "torch._guards.TracingContext",
    _NoContext,
    f"{_KEEPS_NONE}, and computes gradients of what policies keep in float32 in the fast dtype",
)


def tracing_context() -> Any:
    """Return the context of what this thread compiles; None where it compiles nothing."""
    return _TracingContext.try_get()


def _same(function: _T, *_: object) -> _T:
    return function


dynamo_disabled: Callable[[Any], Any] = _read(
    "torch._compile._disable_dynamo", _same, "what a checkpoint computes again may be compiled anew"
)
_UNSEEN = "functions that torch.compile breaks at the entering of a region may run without the region"
_FrameExecStrategy: Any = _read("torch._C._dynamo.eval_frame._FrameExecStrategy", None, _UNSEEN)
_FrameAction: Any = _read("torch._C._dynamo.eval_frame._FrameAction", None, _UNSEEN)
_set_strategy: Any = _read("torch._C._dynamo.eval_frame.set_code_exec_strategy", None, _UNSEEN)
set_eval_frame: Callable[[Any], Any] = _read(
    "torch._C._dynamo.eval_frame.set_eval_frame",
    lambda callback: None,
    "compiled functions that enter a region with policy= may go on under it in code for another",
)


def skip_frames(code: Any, *, below: bool) -> None:
    """Have Dynamo skip the frames of a code object, and those `below` them."""
    if not any(each is None for each in (_FrameExecStrategy, _FrameAction, _set_strategy)):
        _set_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP if below else _FrameAction.DEFAULT))


# ---- torch's own out_dtype.


ops_with_out_dtype: Sequence[OpOverload] = _read(
    "torch._higher_order_ops.out_dtype.ALLOWABLE_OPS", (), "polycast.out_dtype leaves no op to torch's operator"
)
higher_dtype: Callable[[torch.dtype, torch.dtype], torch.dtype | None] = _read(
    "torch._prims_common.get_higher_dtype", torch.promote_types, "polycast.out_dtype is one more op where it is traced"
)
DeviceContext: type = _read(
    "torch.utils._device.DeviceContext",
    _Nobody,
    "polycast.out_dtype takes no kernel of a backend's under torch.set_default_device",
)
