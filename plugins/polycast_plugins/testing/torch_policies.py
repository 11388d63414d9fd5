"""The policies of torch's own autocast kernels, found by calling them; and the policies, written without engines."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from polycast import CastPolicy, uninstall
from polycast.plugin import check, drift_of, dtype_name, find_op

from .samples import SAMPLES, split
from .subject import Device, Subject, describe


def policies_of_torch(device_type: str) -> dict[str, CastPolicy | None]:
    """Return the policies of torch's kernels at a device's Autocast key, by dispatcher name of the op.

    Each is called, with fake tensors if the device is absent, and compared with what policies do: first that of the
    table of the device's backend, which may be one of several that do the same. polycast's kernels are uninstalled.

    Returns:
        The policies; None if a kernel does what no policy does. Ops that the suite has no arguments for, or that cannot
        be run, are left out.

    Raises:
        RuntimeError: torch's kernels cannot be called, or a region for the device is open.
    """
    subject = Subject()
    subject.backend = device_type
    backend = subject.get_backend()
    subject.fake = not check(backend)
    drift = drift_of(backend)
    ours = {*drift.only_in_table, *drift.skipped, *backend.added_ops}
    names = {*backend.policies, *drift.only_in_torch, *drift.excluded_ops} - ours
    try:
        with subject.opened() as device:
            uninstall(device.type)
            return {name: _policy_of(name, device) for name in sorted(names & SAMPLES.keys()) if _runs(name, device)}
    except pytest.skip.Exception as skipped:
        raise RuntimeError(str(skipped)) from None


def _runs(name: str, device: Device) -> bool:
    op, (args, kwargs) = find_op(name), split(SAMPLES[name](device))
    assert op is not None  # it has a kernel
    return bool(_traced(lambda: op(*args, **kwargs))[0])


def _policy_of(name: str, device: Device) -> CastPolicy | None:
    """Return the policy that torch's kernel for an op follows, the table's if it is one of them."""
    sample, policies = split(SAMPLES[name](device)), device.backend.policies
    order = [*filter(None, [policies.get(name)]), *(each for each in CastPolicy if each is not CastPolicy.MATCH)]
    return next((each for each in order if not difference_from_torch(name, each, sample, device)), None)


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops below autocast, each with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        dtypes = [dtype_name(each.dtype) for each in leaves if isinstance(each, torch.Tensor)]
        if not func.name().startswith("prim::"):  # asks for metadata
            self.calls.append(f"{func.name()}({', '.join(dtypes)})")
        return func(*args, **kwargs or {})


def _traced(function: Callable[[], Any]) -> tuple[list[str], str]:
    """Return the ops that a function calls, and a description of what it returns; or the name of what it raises."""
    torch.default_generator.manual_seed(0)
    try:
        with warnings.catch_warnings(), _Trace() as trace:
            warnings.simplefilter("ignore")  # torch warns of ops that it has deprecated
            result = described(function())
        return sorted(trace.calls), result
    except Exception as error:
        return [], type(error).__name__


def difference_from_torch(name: str, policy: CastPolicy, sample: Any, device: Device) -> str:
    """Return how an op is cast otherwise by torch's kernel than by a policy; an empty text if it is not."""
    op, fast = find_op(name), device.backend.default_dtype
    assert op is not None  # it has a kernel
    for how, arguments in variants(sample, device.type, fast):

        def in_torch(op: Any = op, arguments: Any = arguments) -> Any:
            args, kwargs = copied(op, arguments)
            return op(*args, **kwargs)

        before = torch.get_autocast_dtype(device.type)
        torch.set_autocast_dtype(device.type, fast)
        torch.set_autocast_enabled(device.type, True)
        try:
            theirs = _traced(in_torch)
        finally:
            torch.set_autocast_enabled(device.type, False)
            torch.set_autocast_dtype(device.type, before)
        if policy is CastPolicy.BANNED:
            ours: tuple[list[str], str] = [], RuntimeError.__name__
        else:
            ours = _traced(lambda arguments=arguments: call_as(policy, op, arguments, device.type, fast))  # type: ignore[misc]
        if ours[1] == NotImplementedError.__name__ or ours == theirs:
            continue
        return f"with {how} inputs torch's kernel gives {theirs[1]} by {theirs[0]}, the policy {ours[1]} by {ours[0]}"
    return ""


def described(value: object) -> str:
    """Return the dtypes, shapes and devices of a result as text."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    return ", ".join(
        f"{describe(leaf)} on {leaf.device.type}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in tree_leaves(value)
    )


def variants(sample: Any, device_type: str, fast_dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield a sample's arguments in all dtypes that policies distinguish."""
    positions = iter(range(1000))

    def first_in_fast(value: Any) -> Any:
        return value.to(fast_dtype) if _eligible(value, device_type) and next(positions) == 0 else value

    yield "float32", sample
    yield dtype_name(fast_dtype), _cast(sample, device_type, fast_dtype)
    yield "mixed", tree_map(first_in_fast, sample)
    yield "float64", _cast(sample, device_type, torch.float64)


def _eligible(value: object, device_type: str) -> bool:
    """Return whether autocast for a device may cast a value."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype is not torch.float64
        and value.device.type == device_type
    )


def _cast(tree: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Return arguments with each eligible tensor cast."""
    return tree_map(lambda value: value.to(dtype) if _eligible(value, device_type) else value, tree)


def copied(op: torch._ops.OpOverload, arguments: Any) -> Any:
    """Return arguments that an op may write to."""
    if not op._schema.is_mutable:
        return arguments
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, arguments)


def _cast_inputs(
    op: torch._ops.OpOverload, arguments: Any, device_type: str, dtype: torch.dtype, *, only_first: bool = False
) -> Any:
    """Return arguments with each eligible tensor cast, or those of the first argument with one; no written ones."""
    args, kwargs = arguments
    given = {**dict(zip((each.name for each in op._schema.arguments), args, strict=False)), **kwargs}
    written = {each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    names = [
        name
        for name, value in given.items()
        if name not in written and any(_eligible(leaf, device_type) for leaf in tree_leaves(value))
    ]
    cast = {name: _cast(given[name], device_type, dtype) for name in (names[:1] if only_first else names)}
    positional = list({**given, **cast}.values())[: len(args)]
    return positional, {name: cast.get(name, value) for name, value in kwargs.items()}


def call_as(
    policy: CastPolicy,
    op: torch._ops.OpOverload,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    device_type: str,
    fast_dtype: torch.dtype,
) -> Any:
    """Call an op, outside of regions, as a region has to call it. The policy is not BANNED.

    This is the oracle of the op table, written without the engines.
    """
    args, kwargs = arguments = copied(op, arguments)
    schema = op._schema.arguments
    first = args[0] if args else kwargs.get(schema[0].name)
    if policy in (CastPolicy.LOWER_PRECISION_FP, CastPolicy.LOWER_FIRST):
        only_first = policy is CastPolicy.LOWER_FIRST
        args, kwargs = _cast_inputs(op, arguments, device_type, fast_dtype, only_first=only_first)
    elif policy is CastPolicy.FP32:
        args, kwargs = _cast_inputs(op, arguments, device_type, torch.float32)
    elif policy is CastPolicy.PROMOTE:
        dtypes = {leaf.dtype for leaf in tree_leaves(arguments) if _eligible(leaf, device_type)}
        args, kwargs = _cast_inputs(op, arguments, device_type, torch.float32) if len(dtypes) > 1 else arguments
    elif policy is CastPolicy.FP32_SET_OPT_DTYPE and _eligible(first, device_type):
        position = next(at for at, each in enumerate(schema) if str(each.real_type) == "Optional[ScalarType]")
        if len(args) <= position and kwargs.get(schema[position].name) is None:
            kwargs = {**kwargs, schema[position].name: torch.float32}
    elif policy is CastPolicy.FP32_APPEND_DTYPE:
        assert first is not None
        named = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        defaults = {argument.name: argument.default_value for argument in schema if argument.name not in named}
        dtype = torch.float32 if _eligible(first, device_type) else first.dtype
        return op.overloadpacket(**named, **defaults, dtype=dtype)
    return op(*args, **kwargs)
