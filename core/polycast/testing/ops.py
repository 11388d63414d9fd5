"""Checks of the op table: each op, called in a region, does what its policy says."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..engine.drift import drift_of
from ..policy.cast_policy import CastPolicy
from ..policy.schemas import find_op
from . import expected
from .oracle import call_as, eligible
from .samples import SAMPLES, split
from .subject import Device, Subject, require


class OpChecks(Subject):
    """The op table."""

    def test_op(self, device: Device, op: str) -> None:
        """In a region the op does what it does outside of one with its inputs cast as its policy says."""
        overload = find_op(op)
        if overload is None:
            pytest.skip(f"this torch ({torch.__version__}) has no op {op}")
        make = {**SAMPLES, **self.samples}.get(op)
        if make is None:
            pytest.skip(f"{op} was not called: no arguments for it are known. Give them in the attribute `samples`.")
        policy = device.backend.policies[op]
        torch.default_generator.manual_seed(0)
        sample = split(make(device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of ops that it has deprecated, of devices that have no seed
            for fast_dtype in device.fast_dtypes():
                for name, arguments in _variants(sample, device.type, fast_dtype):
                    call = _Call(device, op, overload, arguments, f"with {name} inputs, in a region of {fast_dtype}")
                    if policy is CastPolicy.BANNED:
                        call.must_be_refused(fast_dtype)
                    else:
                        # What the device lacks in another dtype than the default, or between dtypes, is its own affair.
                        required = name == "float32" and fast_dtype is device.backend.default_dtype
                        call.must_be_as(policy, fast_dtype, required=required)

    def test_no_op_of_torchs_table_is_missing(self) -> None:
        """What torch itself treats at the device's Autocast key, the backend's table treats too."""
        reasons = expected.read(self.expected_failures)
        missing = [name for name in drift_of(self.loaded()).only_in_torch if name not in reasons]
        require(
            not missing,
            f"torch {torch.__version__} treats ops at the Autocast key of {self.backend} that the policy table does "
            f"not name, and runs them with kernels of its own: {', '.join(missing)}. Give each a policy, a reason in "
            "excluded_ops or, until then, a line in the file of expected failures.",
        )


class _Call:
    """One call of an op, in a region and as its policy says."""

    def __init__(self, device: Device, name: str, op: torch._ops.OpOverload, arguments: Any, how: str) -> None:
        self.device = device
        self.name = name
        self.op = op
        self.arguments = arguments
        self.how = f"{name} on {device.type}, {how}"

    def in_region(self, fast_dtype: torch.dtype) -> Any:
        args, kwargs = self.arguments
        with self.device.region(fast_dtype):
            return self.op(*args, **kwargs)

    def must_be_refused(self, fast_dtype: torch.dtype) -> None:
        found = _outcome(lambda: self.in_region(fast_dtype))
        refusal = f"{self.name} is unsafe to autocast on {self.device.type}. "
        require(
            isinstance(found, RuntimeError) and str(found).startswith(refusal) and str(found) != refusal,
            f"{self.how}: expected a RuntimeError that begins {refusal!r} and says what to do, got {found!r}",
        )

    def must_be_as(self, policy: CastPolicy, fast_dtype: torch.dtype, *, required: bool) -> None:
        said = _outcome(lambda: call_as(policy, self.op, self.arguments, self.device.type, fast_dtype))
        if required and isinstance(said, Exception):
            if self.device.fake:
                pytest.skip(f"{self.name} was not called: fake tensors of {self.device.type} cannot run it: {said}")
            raise AssertionError(
                f"{self.how}: the device cannot do what {policy.name} says, outside of any region: "
                f"{type(said).__name__}: {said}. If it lacks the op, name the op in the file of expected failures."
            ) from said
        found = _outcome(lambda: self.in_region(fast_dtype))
        if isinstance(said, Exception) or isinstance(found, Exception):
            require(
                type(said) is type(found),
                f"{self.how}: {policy.name} says {_described(said)}, the region gave {_described(found)}",
            )
            return
        require(
            _described(said) == _described(found),
            f"{self.how}: {policy.name} says {_described(said)}, the region gave {_described(found)}",
        )
        if not self.device.fake:
            for expected_leaf, leaf in zip(tree_leaves(said), tree_leaves(found), strict=True):
                _must_have_the_values_of(expected_leaf, leaf, self)


def _must_have_the_values_of(said: object, found: object, call: _Call) -> None:
    if isinstance(said, torch.Tensor) and isinstance(found, torch.Tensor):
        if said.dtype is torch.uint8:
            return  # the workspace of a backward, of which an op leaves parts as they were
        said, found = call.device.values(said), call.device.values(found)
    try:
        torch.testing.assert_close(found, said, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{call.how}: the values are not those of the policy: {error}") from None


def _outcome(function: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    try:
        return function()
    except Exception as error:  # what an op raises is a result too
        return error


def _described(value: object) -> str:
    """Return dtypes, shapes and devices of a result, for people and to compare."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device.type}"
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in tree_leaves(value)
    )


def _variants(sample: Any, device_type: str, fast_dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield a sample's arguments in the dtypes that policies tell apart."""
    positions = iter(range(1000))

    def first_in_fast(value: Any) -> Any:
        return value.to(fast_dtype) if eligible(value, device_type) and next(positions) == 0 else value

    def to(dtype: torch.dtype) -> Any:
        return tree_map(lambda value: value.to(dtype) if eligible(value, device_type) else value, sample)

    yield "float32", sample
    yield str(fast_dtype).removeprefix("torch."), to(fast_dtype)
    yield "mixed", tree_map(first_in_fast, sample)
    yield "float64", to(torch.float64)
