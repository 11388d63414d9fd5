"""Checks of the op table."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from polycast import CastPolicy, Policy, uninstall
from polycast.plugin import drift_of, find_op

from .samples import SAMPLES, split
from .subject import Device, Subject, read_expected, require
from .torch_policies import call_as, copied, described, difference_from_torch, variants

_STATE_DTYPES = (torch.uint8, torch.uint64)
"""The dtypes of a backward's workspace, and of attention's random state, which is for dropout. Ops leave memory of both
uninitialized."""


class OpChecks(Subject):
    """The op table."""

    def test_op(self, device: Device, op: str) -> None:
        """In a region an op does what it does outside of one with its inputs cast by its policy."""
        overload = find_op(op)
        if overload is None:
            reason = device.backend.optional_ops.get(op)
            require(reason is not None, f"{self.backend}: policies: {_missing(op)}")
            pytest.skip(f"this torch ({torch.__version__}) has no op {op}: {reason}")
        make = {**SAMPLES, **self.samples}.get(op)
        if make is None:
            pytest.skip(f"{op} was not called: no arguments for it are known. Give them in the attribute `samples`.")
        policy = device.backend.policies[op]
        torch.default_generator.manual_seed(0)
        sample = split(make(device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of ops that it has deprecated, of devices that have no seed
            for fast_dtype in device.fast_dtypes():
                for name, arguments in variants(sample, device.type, fast_dtype):
                    call = _Call(device, op, overload, arguments, f"with {name} inputs, in a region of {fast_dtype}")
                    if policy is CastPolicy.BANNED:
                        call.must_be_refused(fast_dtype)
                    else:
                        # The device may lack the op for other dtypes than the default, and for mixed ones.
                        required = name == "float32" and fast_dtype is device.backend.default_dtype
                        call.must_be_as(policy, fast_dtype, required=required)

    def test_no_op_of_torchs_table_is_missing(self) -> None:
        """The table has every op for which torch has a kernel at the device's Autocast key."""
        reasons = read_expected(self.expected_failures)
        missing = [name for name in drift_of(self.get_backend()).only_in_torch if name not in reasons]
        require(
            not missing,
            f"torch {torch.__version__} has kernels at the Autocast key of {self.backend} for ops that the table "
            f"does not name, and runs them: {', '.join(missing)}. Give each a policy, a reason in excluded_ops or, "
            "until then, a line in the file of expected failures.",
        )

    def test_reasons_are_for_ops_of_torch(self) -> None:
        """Each name in `excluded_ops` and `added_ops` is an op, or in `optional_ops`: another may be misspelled."""
        backend = self.get_backend()
        for attribute in ("excluded_ops", "added_ops"):
            unknown = [name for name in getattr(backend, attribute) if find_op(name) is None]
            missing = [_missing(name) for name in unknown if name not in backend.optional_ops]
            require(not missing, "\n".join(f"{self.backend}: {attribute}: {each}" for each in missing))

    def test_policies_are_torchs(self, device: Device) -> None:
        """Each op is cast as by the kernel at the device's Autocast key, if torch has one; see `excluded_ops`."""
        backend, samples = device.backend, {**SAMPLES, **self.samples}
        uninstall(device.type)
        drift = drift_of(backend)
        left = {*drift.only_in_table, *drift.skipped, *backend.added_ops, *read_expected(self.expected_failures)}
        problems = []
        for name in sorted(backend.policies.keys() & samples.keys() - left):
            difference = difference_from_torch(name, backend.policies[name], split(samples[name](device)), device)
            if difference and name in backend.excluded_ops:
                print(f"{name}: {backend.policies[name].name} on purpose: {backend.excluded_ops[name]}")
            elif difference:
                problems.append(f"{name}, {backend.policies[name].name}: {difference}")
        require(
            not problems,
            f"{len(problems)} ops of the table are cast otherwise than by the kernels of torch {torch.__version__} at "
            f"the Autocast key of {self.backend}. Correct their policies, or name them in excluded_ops with the "
            "reason:\n" + "\n".join(problems),
        )


class _Call:
    """A call of an op, with the arguments and the text of its failures."""

    def __init__(self, device: Device, name: str, op: torch._ops.OpOverload, arguments: Any, how: str) -> None:
        self.device = device
        self.name = name
        self.op = op
        self.arguments = arguments
        self.how = f"{name} on {device.type}, {how}"

    def in_region(self, fast_dtype: torch.dtype) -> Any:
        args, kwargs = copied(self.op, self.arguments)
        with self.device.region(fast_dtype):
            return self.op(*args, **kwargs)

    def outcome(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns or raises, with the generators of random numbers seeded."""
        if self.device.fake or self.device.type == "cpu":
            torch.default_generator.manual_seed(0)  # the others take ten times as long
        else:
            torch.manual_seed(0)
        try:
            return function()
        except Exception as error:  # is compared too
            return error

    def must_be_refused(self, fast_dtype: torch.dtype) -> None:
        found = self.outcome(lambda: self.in_region(fast_dtype))
        refusal = f"{self.name} is unsafe to autocast on {self.device.type}. "
        require(
            isinstance(found, RuntimeError) and str(found).startswith(refusal) and str(found) != refusal,
            f"{self.how}: expected a RuntimeError that begins {refusal!r} and says what to do, got {found!r}",
        )

    def must_be_as(self, policy: CastPolicy, fast_dtype: torch.dtype, *, required: bool) -> None:
        missing = self.device.backend.missing_dtypes(self.name, tree_leaves(self.arguments))
        dtype = torch.float32 if fast_dtype in missing else fast_dtype
        expected = self.outcome(lambda: call_as(policy, self.op, self.arguments, self.device.type, dtype))
        if required and isinstance(expected, Exception):
            if self.device.fake:
                pytest.skip(f"{self.name} was not called: fake tensors of {self.device.type} cannot run it: {expected}")
            raise AssertionError(
                f"{self.how}: the device cannot do what {policy.name} says, outside of any region: "
                f"{type(expected).__name__}: {expected}. If it lacks the op, add it to the file of expected failures."
            ) from expected
        found = self.outcome(lambda: self.in_region(fast_dtype))
        raised = isinstance(expected, Exception) or isinstance(found, Exception)
        require(
            type(expected) is type(found) if raised else described(expected) == described(found),
            f"{self.how}: {policy.name} gives {described(expected)}, the region gave {described(found)}",
        )
        if not raised and not self.device.fake:
            for expected_leaf, leaf in zip(tree_leaves(expected), tree_leaves(found), strict=True):
                self.must_equal(expected_leaf, leaf)

    def must_equal(self, expected: object, found: object) -> None:
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
            if expected.dtype in _STATE_DTYPES:
                return
            expected, found = self.device.values(expected), self.device.values(found)
        try:
            torch.testing.assert_close(found, expected, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{self.how}: the values differ from those of the policy: {error}") from None


def _missing(op: str) -> str:
    """Return what is wrong with an op that no loaded library has, and what to do."""
    try:
        Policy({op if "." in op else f"{op}.default": CastPolicy.BANNED})
        problem = f"this torch ({torch.__version__}) has no op {op}"
    except ValueError as error:
        problem = str(error).removeprefix("policy: ").rstrip(".")
    return (
        f"{problem}. Correct the name or, if the op is of another torch or of a library that is not loaded, name it in "
        "optional_ops with the reason."
    )
