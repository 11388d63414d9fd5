"""List what violates the contract of a `Backend` or an `Extension`, attribute by attribute."""

from collections.abc import Mapping

import torch

from ..torch_internals.dispatcher import OpOverload, has_autocast_key


def device_problems(device_type: object, expected: str | None) -> list[str]:
    """Return what is wrong with a `device_type`, which must be the expected one, if that is known."""
    if not isinstance(device_type, str):
        return [f"device_type must be a str, got {device_type!r}"]
    if expected is not None and device_type != expected:
        return [f"device_type is {device_type!r}, but the entry point is named {expected!r}: they must be equal"]
    try:
        known = torch.device(device_type)
    except RuntimeError:
        return [f"device_type {device_type!r} is not a device that torch knows; an out-of-tree device is named first"]
    if known.type != device_type or known.index is not None:
        return [f"device_type {device_type!r} must be a type without an index: {known.type!r}"]
    if not has_autocast_key(device_type):
        return [f"torch has no Autocast dispatch key for {device_type!r}"]
    return []


def dtype_problems(dtype: object) -> list[str]:
    """Return what is wrong with a `default_dtype`."""
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return []
    return [f"default_dtype must be a floating-point torch.dtype, got {dtype!r}"]


def kernel_problems(kernels: object) -> list[str]:
    """Return what is wrong with `kernels`."""
    if not isinstance(kernels, Mapping):
        return [f"kernels must map (OpOverload, input dtype, output dtype) to a callable, got {type(kernels).__name__}"]
    problems = [
        f"kernels: {key!r} must be (OpOverload, input dtype, output dtype), and its kernel callable"
        for key, kernel in kernels.items()
        if not (
            isinstance(key, tuple)
            and len(key) == 3
            and isinstance(key[0], OpOverload)
            and all(isinstance(dtype, torch.dtype) for dtype in key[1:])
            and callable(kernel)
        )
    ]
    return problems or [
        f"kernels: {op} must be a functional op that returns one tensor"
        for op in dict.fromkeys(op for op, _, _ in kernels)
        if op._schema.is_mutable or [type(result.type) for result in op._schema.returns] != [torch.TensorType]
    ]


def are_texts(texts: object) -> bool:
    """Return whether `texts` maps strs to strs."""
    return isinstance(texts, Mapping) and all(isinstance(text, str) for pair in texts.items() for text in pair)


def package_problems(packages: object) -> list[str]:
    """Return what is wrong with `ops_in_cpp`."""
    if isinstance(packages, (list, tuple)) and all(
        isinstance(package, str) and all(part.isidentifier() for part in package.split(".")) for package in packages
    ):
        return []
    return [f"ops_in_cpp must be a list or tuple of the names of packages, got {packages!r}"]
