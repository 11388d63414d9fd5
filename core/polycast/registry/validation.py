"""The contract of a `Backend` and an `Extension`: check an object of a plugin, and list all that violates it."""

from collections.abc import Collection, Mapping, Sequence

import torch

from ..common.versions import api_problem, misspelled
from ..errors import InvalidBackendError
from ..policy.cast_policy import CastPolicy
from ..policy.matching import MATCHED
from ..policy.schemas import is_op_name, table_problems
from ..torch_internals.dispatcher import OpOverload, has_autocast_key
from .backend import Backend, Extension

_REQUIRED = ("device_type", "default_dtype", "policies")


def validate_extension(extension: object, device_type: str | None = None) -> Extension:
    """Return `extension` if it satisfies the contract; see :func:`validate`."""
    if not isinstance(extension, Extension) or isinstance(extension, Backend):
        raise InvalidBackendError(f"expected an instance of polycast.plugin.Extension, got {_what(extension)}")
    problems = _contract_problems(extension, Extension)
    has_device = hasattr(extension, "device_type")
    problems += _device_problems(extension.device_type, device_type) if has_device else ["device_type is missing"]
    problems += [f"policies: {problem}" for problem in table_problems(extension.policies)]
    problems += _package_problems(extension.ops_in_cpp)
    _raise_if_any(problems, extension, "Extension")
    return extension


def validate(backend: object, device_type: str | None = None) -> Backend:
    """Return `backend` if it satisfies the contract.

    Args:
        backend: the object from a plugin's hook or a caller of ``register_backend``.
        device_type: the device type that it must have, if known (the entry point's name).

    Raises:
        InvalidBackendError: it violates the contract; the message lists every problem.
    """
    if not isinstance(backend, Backend):
        raise InvalidBackendError(f"expected an instance of polycast.plugin.Backend, got {_what(backend)}")
    problems = _contract_problems(backend, Backend)
    # `Extension` has policies for those without any, which do not count here.
    missing = [name for name in _REQUIRED if getattr(backend, name, Extension.policies) is Extension.policies]
    problems += [f"{name} is missing" for name in missing]
    if "device_type" not in missing:
        problems += _device_problems(backend.device_type, device_type)
    dtype = getattr(backend, "default_dtype", torch.float32)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        problems.append(f"default_dtype must be a floating-point torch.dtype, got {dtype!r}")
    problems += [f"policies: {problem}" for problem in table_problems(backend.policies)]
    problems += _kernel_problems(backend.kernels)
    for name in ("remedies", "excluded_ops", "added_ops", "optional_ops"):
        problems += _reason_problems(name, getattr(backend, name))
    if not _are_dtypes(backend.missing_kernels):
        problems.append("missing_kernels must map op names and layouts to collections of torch.dtype")
    problems += _package_problems(backend.ops_in_cpp)
    problems += [
        f"{name}() is not implemented"
        for name in ("supported_dtypes", "availability")
        if getattr(type(backend), name) is getattr(Backend, name)
    ]
    if not problems:  # it is made of the others
        problems = _matched_problems(backend.matched_ops)
    _raise_if_any(problems, backend, "Backend")
    return backend


def _contract_problems(given: Extension, contract: type[Extension]) -> list[str]:
    """Return the names that are nearly those of the contract; raise if it is made for another version of it."""
    problem = api_problem(given.api)
    if problem:
        raise InvalidBackendError(f"{type(given).__qualname__}: {problem}")
    own = {name for cls in type(given).__mro__ if cls not in contract.__mro__ for name in vars(cls)}
    problems = misspelled(own.union(vars(given)), {*dir(contract), *_REQUIRED})
    return [f"{problem} (begin a name of your own with an underscore)" for problem in problems]


def _what(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"{type(given).__name__}: {given!r}"


def _raise_if_any(problems: Sequence[str], given: object, contract: str) -> None:
    if problems:
        raise InvalidBackendError(
            f"{type(given).__module__}.{type(given).__qualname__} violates the contract of "
            f"polycast.plugin.{contract}:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


def _device_problems(device_type: object, expected: str | None) -> list[str]:
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
    return [] if has_autocast_key(device_type) else [f"torch has no Autocast dispatch key for {device_type!r}"]


def _matched_problems(ops: object) -> list[str]:
    if not isinstance(ops, frozenset):
        return [f"matched_ops must be a frozenset of op names, got {ops!r}"]
    unknown = dict.fromkeys(ops - MATCHED, CastPolicy.MATCH)
    return [f"matched_ops: {problem}" for problem in table_problems(unknown)]


def _kernel_problems(kernels: object) -> list[str]:
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


def _reason_problems(name: str, texts: object) -> list[str]:
    if isinstance(texts, Mapping) and all(isinstance(text, str) for pair in texts.items() for text in pair):
        return [f"{name}: {problem}" for problem in table_problems(dict.fromkeys(texts, CastPolicy.PASSTHROUGH))]
    return [f"{name} must map op names to sentences"]


def _are_dtypes(missing: object) -> bool:
    return isinstance(missing, Mapping) and all(
        (isinstance(key, torch.layout) or is_op_name(key))
        and isinstance(dtypes, Collection)
        and all(isinstance(dtype, torch.dtype) for dtype in dtypes)
        for key, dtypes in missing.items()
    )


def _package_problems(packages: object) -> list[str]:
    if isinstance(packages, (list, tuple)) and all(
        isinstance(package, str) and all(part.isidentifier() for part in package.split(".")) for package in packages
    ):
        return []
    return [f"ops_in_cpp must be a list or tuple of the names of packages, got {packages!r}"]
