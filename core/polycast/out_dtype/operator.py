"""Run an op with its result in another dtype: on the device's own kernel where its backend has one.

torch has an operator for this, ``torch.ops.higher_order.out_dtype``, which export keeps and Inductor lowers. In eager
mode it casts the inputs, runs the op on the casts and casts the result. Plain tensors go to a kernel in its place; what
traces, transforms or watches ops is shown the operator.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function

from ..engine.casts.weights import caching_is_safe
from ..errors import BackendNotFoundError, InvalidBackendError
from ..plugins.checks import check_availability
from ..plugins.registry import registry
from ..torch_internals.dispatcher import OpOverload, disable_autocast, is_any_autocast_enabled
from ..torch_internals.names import (
    DeviceContext,
    delayed_error,
    function_modes,
    higher_dtype,
    is_functional_tensor,
    ops_with_out_dtype,
)

_TORCH_TAKES = frozenset(ops_with_out_dtype)


def out_dtype(op: OpOverload, dtype: torch.dtype, *args: Any) -> torch.Tensor:
    """Run `op` with the result in `dtype`, computed as if the inputs were in that dtype too.

    The backend's kernel for the op and these dtypes runs, if there is one; else ``torch.ops.higher_order.out_dtype``.
    That runs too where ops are traced, transformed or watched: in ``torch.compile``, export, ``make_fx``, functorch, in
    modes and for tensor subclasses. There is no autograd: backward raises, as it does for torch's operator. Autocast
    casts what torch's operator runs, but nothing of a kernel.

    Args:
        op: a functional overload that returns one tensor, such as ``torch.ops.aten.mm.default``; one that torch's
            operator takes, or one that the backend has a kernel for.
        dtype: the dtype of the result.
        args: the arguments of the op, by position.

    Returns:
        The result, in `dtype`. Integers wrap where they leave its range.

    Raises:
        TypeError: `dtype` is not a torch.dtype, or no argument is a tensor.
        ValueError: torch's operator does not take the op, and there is no kernel for it.
        RuntimeError: the tensors are on different devices; or the op refuses its arguments; or the backend of their
            device cannot be loaded (see :func:`polycast.get_backend`).
        InvalidBackendError: the kernel returned something else than a tensor in `dtype`.

    Example:
        >>> import torch, polycast
        >>> a = torch.full((1, 2), 127, dtype=torch.int8)
        >>> polycast.out_dtype(torch.ops.aten.mm.default, torch.int32, a, a.t())
        tensor([[32258]], dtype=torch.int32)
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.int32; got {dtype!r}")
    if not isinstance(op, OpOverload):
        return _by_torch(op, dtype, args)  # which refuses it
    if torch.compiler.is_compiling() or not _all_plain(args) or not caching_is_safe():
        return _as_ops(op, dtype, args)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    _check(op, args, tensors)
    kernel = _kernel(op, dtype, tensors)
    if kernel is None or len(args) not in _positions(op):
        return _as_ops(op, dtype, args)
    result = _run(kernel, args, tensors)
    if result is NotImplemented:
        return _by_torch(op, dtype, args) if op in _TORCH_TAKES else _run(_on_casts(op, dtype), args, tensors)
    if not isinstance(result, torch.Tensor) or result.dtype is not dtype:
        raise InvalidBackendError(f"the kernel for {op} must return a tensor in {dtype}, got {_name(result)}")
    return result


@functools.cache
def _positions(op: OpOverload) -> range:
    """Return how many arguments an op takes by position."""
    arguments = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    return range(sum(not argument.has_default_value() for argument in arguments), len(arguments) + 1)


def _by_torch(op: OpOverload, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    result: torch.Tensor = torch.ops.higher_order.out_dtype(op, dtype, *args)
    return result


def _as_ops(op: OpOverload, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    """Run torch's operator or, for an op that it does not take but a kernel does, the ops that it would run."""
    if (
        op not in _TORCH_TAKES
        and _kernel(op, dtype, [arg for arg in args if isinstance(arg, torch.Tensor)]) is not None
    ):
        return _on_casts(op, dtype)(*args)
    return _by_torch(op, dtype, args)


def _on_casts(op: OpOverload, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return what torch's operator does for the ops that it takes: cast, compute and cast."""

    def run(*args: Any) -> torch.Tensor:
        wide = dtype
        for arg in args:
            if isinstance(arg, torch.Tensor):
                wide = _wider(wide, arg.dtype)
        result: torch.Tensor = op(*(arg.to(wide) if isinstance(arg, torch.Tensor) else arg for arg in args))
        return result.to(dtype)

    return run


def _wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return higher_dtype(one, other) or one  # torch.promote_types is an op too, and would be traced


def _all_plain(args: Sequence[Any]) -> bool:
    """Say whether all tensors are strided ones of torch's own, and nothing overrides torch's functions."""
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if arg.layout is not torch.strided or arg.is_nested or is_functional_tensor(arg):
                return False
        elif isinstance(arg, torch.Tensor):
            return False
    return not (has_torch_function(args) and _overridden(args))


def _overridden(args: Sequence[Any]) -> bool:
    """Say which overriding counts: not the mode of ``torch.set_default_device``, which is about other functions."""
    modes = function_modes()
    others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    return any(type(mode) is not DeviceContext for mode in modes) or any(
        hasattr(arg, "__torch_function__") for arg in others
    )


def _check(op: OpOverload, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse what torch's operator would read as it is: no tensor at all, or memory of another device."""
    if not tensors and op in _TORCH_TAKES:
        raise TypeError(f"out_dtype needs a tensor to compute on, but {op} was given {args!r}")
    devices = {tensor.device for tensor in tensors if tensor.dim()}  # one without dimensions may stay on the CPU
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"out_dtype needs all tensors on one device, but {op} was given some on {names}")


def _kernel(op: OpOverload, dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
    """Return the kernel of the tensors' device, if there is one and the device can be used.

    The input dtype is the one that the tensors have, those apart that are in `dtype` already.
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
    return registry.find(device_type).kernels.get((op, source, dtype))


def _usable(device_type: str) -> bool:
    try:
        return check_availability(registry.find(device_type)).available
    except BackendNotFoundError:
        return False


# What torch.compiler.assume_constant_result sets, without its import of Dynamo, which cannot trace these two.
for _function in (_usable, _wider):
    setattr(_function, "_dynamo_marked_constant", True)


def _run(kernel: Callable[..., Any], args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Call a kernel outside of autocast and autograd; its result has the backward of torch's operator, which raises."""
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not differentiable and not is_any_autocast_enabled():
        return kernel(*args)
    with torch.no_grad(), disable_autocast():
        result = kernel(*args)
    if differentiable and isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()):
        message = f"Autograd not implemented for {torch.ops.higher_order.out_dtype}"
        result = delayed_error(message, 1)(result.detach().requires_grad_())
    return result


def _name(value: object) -> str:
    return f"one in {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
