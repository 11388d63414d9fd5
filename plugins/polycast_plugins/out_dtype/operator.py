"""Run an op with its result in another dtype, with a kernel of the backend if there is one.

torch has an operator for this, ``torch.ops.higher_order.out_dtype``, which export keeps and Inductor lowers. In eager
mode it casts the inputs, runs the op on the casts and casts the result. Here plain tensors go to a kernel of the
backend instead; code that traces, transforms or watches ops sees torch's operator.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.overrides import has_torch_function

from polycast.errors import BackendNotFoundError, InvalidBackendError
from polycast.plugin import check, disable_autocast, get_backend, torch_name

if TYPE_CHECKING:
    from torch._ops import OpOverload
else:
    OpOverload = type(torch.ops.aten.mm.default)

_TORCH_SUPPORTS: frozenset[OpOverload] = frozenset(
    torch_name(
        "torch._higher_order_ops.out_dtype.ALLOWABLE_OPS", (), "polycast.out_dtype leaves no op to torch's operator"
    )
)
_function_modes: Callable[[], list[Any]] = torch_name(
    "torch.overrides._get_current_function_mode_stack", lambda: [], "polycast.out_dtype does not see function modes"
)
_KERNELS_UNUSED = "polycast.out_dtype takes no kernel of a backend's"
_dispatch_mode_count: Callable[[], int] = torch_name("torch._C._len_torch_dispatch_stack", lambda: 1, _KERNELS_UNUSED)
_are_functorch_transforms_active: Callable[[], bool] = torch_name(
    "torch._C._are_functorch_transforms_active", lambda: True, _KERNELS_UNUSED
)
_is_traced: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
_unpack_dual: Callable[[torch.Tensor], Any] = torch.autograd.forward_ad.unpack_dual
_is_functional_tensor: Callable[[torch.Tensor], bool] = torch_name(
    "torch._is_functional_tensor", lambda tensor: False, "polycast.out_dtype cannot be functionalized"
)
_delayed_error: Callable[[str, int], Callable[[torch.Tensor], torch.Tensor]] = torch_name(
    "torch._C._functions.DelayedError",
    lambda message, count: torch.Tensor.detach,
    "results of polycast.out_dtype have no backward, in place of one that raises",
)
_higher_dtype: Callable[[torch.dtype, torch.dtype], torch.dtype | None] = torch_name(
    "torch._prims_common.get_higher_dtype", torch.promote_types, "polycast.out_dtype is one more op where it is traced"
)
_DeviceContext: type = torch_name(
    "torch.utils._device.DeviceContext",
    type("DeviceContext", (), {}),
    "polycast.out_dtype takes no kernel of a backend's under torch.set_default_device",
)


_T = TypeVar("_T")


def out_dtype(op: OpOverload, dtype: torch.dtype, *args: Any) -> torch.Tensor:
    """Run `op` with the result in `dtype`, computed as if the inputs were in that dtype too.

    The backend's kernel for the op and these dtypes runs, if there is one, otherwise
    ``torch.ops.higher_order.out_dtype``. The latter also runs where ops are traced, transformed or watched: in
    ``torch.compile``, export, ``make_fx``, functorch, in modes and for tensor subclasses. There is no autograd:
    backward raises, as for torch's operator. Autocast applies to the ops of torch's operator, but not to a kernel.

    Args:
        op: a functional overload that returns one tensor, such as ``torch.ops.aten.mm.default``, and that torch's
            operator supports or the backend has a kernel for.
        dtype: the dtype of the result.
        args: the arguments of the op, by position.

    Returns:
        The result, in `dtype`. Integers wrap where they leave its range.

    Raises:
        TypeError: `dtype` is not a torch.dtype, or no argument is a tensor.
        ValueError: torch's operator does not support the op, and there is no kernel for it.
        RuntimeError: the tensors are on different devices; the op refuses its arguments; or the backend of their
            device cannot be loaded (see :func:`polycast.plugin.get_backend`).
        InvalidBackendError: the kernel did not return a tensor in `dtype`.

    Example:
        >>> import torch, polycast
        >>> a = torch.full((1, 2), 127, dtype=torch.int8)
        >>> polycast.out_dtype(torch.ops.aten.mm.default, torch.int32, a, a.t())
        tensor([[32258]], dtype=torch.int32)
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.int32; got {dtype!r}")
    if not isinstance(op, OpOverload):
        return _by_torch(op, dtype, args)  # raises
    if torch.compiler.is_compiling() or not _all_plain(args):
        return _as_ops(op, dtype, args)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if _are_intercepted(tensors):
        return _as_ops(op, dtype, args)
    _check(op, args, tensors)
    kernel = _kernel(op, dtype, tensors)
    if kernel is None or len(args) not in _positions(op):
        return _as_ops(op, dtype, args)
    result = _run(kernel, args, tensors)
    if result is NotImplemented:
        return _by_torch(op, dtype, args) if op in _TORCH_SUPPORTS else _run(_on_casts(op, dtype), args, tensors)
    if not isinstance(result, torch.Tensor) or result.dtype is not dtype:
        raise InvalidBackendError(f"the kernel for {op} must return a tensor in {dtype}, got {_name(result)}")
    return result


@functools.cache
def _positions(op: OpOverload) -> range:
    """Return the possible numbers of positional arguments of an op."""
    arguments = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    return range(sum(not argument.has_default_value() for argument in arguments), len(arguments) + 1)


def _by_torch(op: OpOverload, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    result: torch.Tensor = torch.ops.higher_order.out_dtype(op, dtype, *args)
    return result


def _as_ops(op: OpOverload, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    """Run torch's operator, or the same ops for an op that only a kernel supports."""
    if (
        op not in _TORCH_SUPPORTS
        and _kernel(op, dtype, [arg for arg in args if isinstance(arg, torch.Tensor)]) is not None
    ):
        return _on_casts(op, dtype)(*args)
    return _by_torch(op, dtype, args)


def _on_casts(op: OpOverload, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a function that casts, computes and casts, as torch's operator does."""

    def run(*args: Any) -> torch.Tensor:
        wide = dtype
        for arg in args:
            if isinstance(arg, torch.Tensor):
                wide = _wider(wide, arg.dtype)
        result: torch.Tensor = op(*(arg.to(wide) if isinstance(arg, torch.Tensor) else arg for arg in args))
        return result.to(dtype)

    return run


def _constant_to_dynamo(function: _T) -> _T:
    """Decorate a function that Dynamo, which cannot trace it, calls while it traces, taking the result for a constant.

    As :func:`torch.compiler.assume_constant_result`, without importing Dynamo.
    """
    setattr(function, "_dynamo_marked_constant", True)
    return function


@_constant_to_dynamo
def _wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return _higher_dtype(one, other) or one  # torch.promote_types is an op too, and would be traced


def _all_plain(args: Sequence[Any]) -> bool:
    """Return whether all tensors are plain strided ones, and nothing overrides torch functions."""
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if arg.layout is not torch.strided or arg.is_nested or _is_functional_tensor(arg):
                return False
        elif isinstance(arg, torch.Tensor):
            return False
    return not (has_torch_function(args) and _overridden(args))


def _overridden(args: Sequence[Any]) -> bool:
    """Return whether something other than ``torch.set_default_device`` overrides torch functions."""
    modes = _function_modes()
    others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    return any(type(mode) is not _DeviceContext for mode in modes) or any(
        hasattr(arg, "__torch_function__") for arg in others
    )


def _are_intercepted(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a dispatch mode, a tracer or a transform sees the ops on tensors."""
    if _dispatch_mode_count() or _are_functorch_transforms_active() or _is_traced():
        return True
    return any(_unpack_dual(tensor).tangent is not None for tensor in tensors)


def _check(op: OpOverload, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse calls without tensors, and with tensors on several devices, which torch's operator would accept."""
    if not tensors and op in _TORCH_SUPPORTS:
        raise TypeError(f"out_dtype needs a tensor to compute on, but {op} was given {args!r}")
    devices = {tensor.device for tensor in tensors if tensor.dim()}  # one without dimensions may be on the CPU
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"out_dtype needs all tensors on one device, but {op} was given some on {names}")


def _kernel(op: OpOverload, dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
    """Return the kernel of the tensors' device, or None if there is none or the device cannot be used.

    The input dtype is that of the tensors that are not already in `dtype`.
    """
    source, device_type = dtype, None
    for tensor in tensors:
        if device_type is None or tensor.dim():
            device_type = tensor.device.type
        if tensor.dtype is not dtype:
            if source is not dtype and source is not tensor.dtype:
                return None
            source = tensor.dtype
    if device_type is None or not _usable(device_type):
        return None
    return get_backend(device_type).kernels.get((op, source, dtype))


@_constant_to_dynamo
def _usable(device_type: str) -> bool:
    try:
        return check(get_backend(device_type)).available
    except BackendNotFoundError:
        return False


def _run(kernel: Callable[..., Any], args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Call a kernel outside of autocast and autograd. As with torch's operator, backward through its result raises."""
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not differentiable and not any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors):
        return kernel(*args)
    with torch.no_grad(), disable_autocast():
        result = kernel(*args)
    if differentiable and isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()):
        message = f"Autograd not implemented for {torch.ops.higher_order.out_dtype}"
        result = _delayed_error(message, 1)(result.detach().requires_grad_())
    return result


def _name(value: object) -> str:
    return f"one in {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
