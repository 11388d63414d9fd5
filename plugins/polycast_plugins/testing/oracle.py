"""The test oracle of policies: an op called with its inputs cast, written without the engines."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from polycast import CastPolicy


def eligible(value: object, device_type: str) -> bool:
    """Return whether autocast for a device may cast a value."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype is not torch.float64
        and value.device.type == device_type
    )


def cast(tree: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Return arguments with each eligible tensor cast."""
    return tree_map(lambda value: value.to(dtype) if eligible(value, device_type) else value, tree)


def call_as(
    policy: CastPolicy,
    op: torch._ops.OpOverload,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    device_type: str,
    fast_dtype: torch.dtype,
) -> Any:
    """Call an op, outside of regions, as a region has to call it. The policy is not BANNED."""
    args, kwargs = arguments
    schema = op._schema.arguments
    first = args[0] if args else kwargs.get(schema[0].name)
    if policy is CastPolicy.LOWER_PRECISION_FP:
        args, kwargs = cast(arguments, device_type, fast_dtype)
    elif policy is CastPolicy.FP32:
        args, kwargs = cast(arguments, device_type, torch.float32)
    elif policy is CastPolicy.PROMOTE:
        dtypes = {leaf.dtype for leaf in tree_leaves(arguments) if eligible(leaf, device_type)}
        args, kwargs = cast(arguments, device_type, torch.float32) if len(dtypes) > 1 else arguments
    elif policy is CastPolicy.FP32_SET_OPT_DTYPE and eligible(first, device_type):
        position = next(at for at, each in enumerate(schema) if str(each.real_type) == "Optional[ScalarType]")
        if len(args) <= position and kwargs.get(schema[position].name) is None:
            kwargs = {**kwargs, schema[position].name: torch.float32}
    elif policy is CastPolicy.FP32_APPEND_DTYPE:
        assert first is not None
        named = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        defaults = {argument.name: argument.default_value for argument in schema if argument.name not in named}
        dtype = torch.float32 if eligible(first, device_type) else first.dtype
        return op.overloadpacket(**named, **defaults, dtype=dtype)
    return op(*args, **kwargs)
