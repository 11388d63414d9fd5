"""Private names of torch's dispatcher: devices, dispatch keys, operators, schemas."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .lookup import torch_name

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef as CustomOpDef
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
else:
    OpOverload = type(torch.ops.aten.mm.default)
    OpOverloadPacket = type(torch.ops.aten.mm)
    CustomOpDef = torch_name(
        "torch._library.custom_ops.CustomOpDef",
        type("CustomOpDef", (), {}),
        "ops cannot be given as torch.library.custom_op returned them",
    )

# ---- Devices.

_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")
_WITH_AUTOCAST_TABLES = ("CPU", "CUDA", "XPU", "MPS", "MTIA", "MAIA")

has_autocast_key: Callable[[str], bool] = torch.amp.is_autocast_available
"""Return whether torch has an Autocast key for a device type: torch's own function, also while torch is patched."""

autocast_supported_devices: Callable[[], list[str]] = torch_name(
    "torch._C._autocast_supported_devices",
    lambda: [name for name in _DEVICES if has_autocast_key(name)],
    "regions of out-of-tree devices are not captured for other threads and checkpoints",
)
dispatch_key_for_device: Callable[[str], str] = torch_name(
    "torch._C._dispatch_key_for_device",
    lambda device_type: device_type.upper() if device_type in _DEVICES else "PrivateUse1",
    "devices outside polycast's own list are taken for out-of-tree ones",
)

# ---- Dispatch keys.

DispatchKeySet: TypeAlias = Any

dispatch_key: Callable[[str], Any] = torch_name(
    "torch._C._parse_dispatch_key",
    lambda name: getattr(torch._C.DispatchKey, name, None),
    "some dispatch keys are unknown",
)
"""Return a dispatch key by its name, or None if it is unknown."""
_has_fallback: Callable[[Any], bool] | None = torch_name(
    "torch._C._dispatch_has_backend_fallback",
    None,
    "which devices torch has autocast tables for is taken from polycast's own list",
)
_exclude_set: Callable[[], Any] | None = torch_name(
    "torch._C._dispatch_tls_local_exclude_set", None, "modules under rules are called more slowly"
)
_include_set: Callable[[], Any] | None = torch_name(
    "torch._C._dispatch_tls_local_include_set", None, "compiled recipes leave views of weights out"
)
_ForceKeys: Any = torch_name("torch._C._ForceDispatchKeyGuard", None, "compiled recipes leave views of weights out")
_full_after: Callable[[Any], DispatchKeySet] | None = torch_name(
    "torch._C._dispatch_keyset_full_after",
    None,
    "on the reference engine, ops that other regions' policies name are not autocast inside",
)


def has_backend_fallback(name: str) -> bool:
    """Return whether a dispatch key has a fallback kernel."""
    key = dispatch_key(name)
    if _has_fallback is None or key is None:
        return name.removeprefix("Autocast") in _WITH_AUTOCAST_TABLES
    return _has_fallback(key)


def excluded_keys() -> int:
    """Return a number that identifies the autocast keys that are excluded on this thread."""
    if _exclude_set is not None:
        number: int = _exclude_set().raw_repr()
        return number
    return sum(torch.is_autocast_enabled(name) << place for place, name in enumerate(autocast_supported_devices()))


def tracking_views() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which autograd tracks views below its own key, in compiled code."""
    key = dispatch_key("ADInplaceOrView")
    if key is None or _exclude_set is None or _include_set is None or _ForceKeys is None:
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = _ForceKeys(_include_set(), _exclude_set().remove(key))
    return guard


def keys_below(name: str) -> DispatchKeySet | None:
    """Return the dispatch keys below one, or None if they are unknown."""
    key = dispatch_key(name)
    return None if key is None or _full_after is None else _full_after(key)


@contextlib.contextmanager
def _autocast_disabled() -> Iterator[None]:
    enabled = [name for name in autocast_supported_devices() if torch.is_autocast_enabled(name)]
    for name in enabled:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name in enabled:
            torch.set_autocast_enabled(name, True)


disable_autocast: Callable[[], contextlib.AbstractContextManager[Any]] = torch_name(
    "torch._C._DisableAutocast", _autocast_disabled, "autocast is disabled more slowly"
)
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] | None = torch_name(
    "torch._C._AutoDispatchBelowAutograd",
    None,
    "compiled training casts the weights of a WeightCache at each call",
)
is_any_autocast_enabled: Callable[[], bool] = torch_name(
    "torch._C._is_any_autocast_enabled",
    lambda: any(map(torch.is_autocast_enabled, autocast_supported_devices())),
    "polycast.capture is slower",
)

# ---- Operators.


def python_kernels(op: OpOverload) -> dict[Any, Any]:
    """Return the Python kernels of an op, by dispatch key."""
    kernels: dict[Any, Any] = getattr(op, "py_kernels", {})
    return kernels


def clear_dispatch_cache(op: OpOverload) -> None:
    """Clear the dispatch cache of an op."""
    cache = getattr(op, "_dispatch_cache", None)
    if cache is not None:
        cache.clear()


_key_of_kernel: Callable[[OpOverload, Any], Any] = torch_name(
    "torch._ops.resolve_key",
    lambda op, key: key,
    "on the reference engine, policies for composite ops that torch calls with numbers may end the process",
)
"""Return the key of the kernel that an op has for a key: itself, or an alias such as CompositeImplicitAutograd."""


_takes_numbers: Callable[[str], bool] = torch_name(
    "torch._C._should_allow_numbers_as_tensors",
    lambda name: True,
    "the reference engine refuses numbers in place of tensors for some ops",
)


@functools.cache
def _positions_of_tensors(op: OpOverload) -> tuple[int, ...]:
    arguments = op._schema.arguments
    return tuple([at for at, argument in enumerate(arguments) if str(argument.real_type) == "Tensor"])


def with_tensors_for_numbers(op: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
    """Return the positional arguments of an op, with tensors in place of numbers that calls from Python do not take.

    A Python kernel receives the 2 of ``x * 2``, a tensor in C++ that does not promote, as a number.
    """
    numbers = [at for at in _positions_of_tensors(op) if at < len(args) and isinstance(args[at], (int, float, complex))]
    others = [each for each in args if isinstance(each, torch.Tensor)]
    if not numbers or not others or _takes_numbers(op._schema.name.partition("::")[2]):
        return args
    return [
        torch.tensor(each, dtype=torch.result_type(others[0], each)) if at in numbers else each
        for at, each in enumerate(args)
    ]


def redispatch(op: OpOverload, keys: DispatchKeySet, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an op with the kernel of the highest of `keys`.

    ``OpOverload.redispatch`` does not accept a number for a Tensor. Calling the kernel of a single key converts it to
    the tensor that it was. The key must be that of a kernel: for another, such as the CPU's of a composite op, torch
    calls a null pointer.
    """
    args = with_tensors_for_numbers(op, args)
    if all(isinstance(args[at], torch.Tensor) for at in _positions_of_tensors(op) if at < len(args)):
        return op.redispatch(keys, *args, **kwargs)
    return op._op_dk(_key_of_kernel(op, keys.highestPriorityTypeId()), *args, **kwargs)


has_kernel_for_dispatch_key: Callable[[str, str], bool] = torch_name(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    lambda op, key: False,
    "drift, explanations and observations do not know which ops torch itself autocasts",
)
has_kernel: Callable[[str], bool] = torch_name(
    "torch._C._dispatch_has_kernel",
    lambda op: True,
    "regions that wait for ops of other libraries are entered more slowly",
)
all_op_names: Callable[[], Sequence[str]] = torch_name(
    "torch._C._dispatch_get_all_op_names",
    lambda: (),
    "unknown names of ops are refused without a suggestion, and drift knows no ops of torch's",
)


def _schema_by_packet(qualified: str, overload: str) -> None:
    namespace, _, base = qualified.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), base, None)
    if not isinstance(packet, OpOverloadPacket) or (overload or "default") not in packet.overloads():  # type: ignore[no-untyped-call]
        raise RuntimeError(f"no schema {qualified}.{overload}")


find_schema_or_throw: Callable[[str, str], object] = torch_name(
    "torch._C._dispatch_find_schema_or_throw", _schema_by_packet, "ops are looked up more slowly"
)
resolve_packet: Callable[..., str] | None = torch_name(
    "torch._C._jit_resolve_packet",
    None,
    "polycast.explain must be given the overload of an op that has several",
)
