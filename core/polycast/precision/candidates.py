"""What can be kept in float32: modules or ops; and the policy that says so of some of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

from ..plugins.registry import get_backend
from ..policy.cast_policy import CastPolicy
from ..policy.dtypes import dtype_name
from ..policy.names import named, ops_with, read_op
from ..policy.schemas import find_op
from ..policy.value import Policy
from ..region.autocast import autocast
from .calls import Call
from .hooks import uncompiled
from .search import Members
from .survey import Survey

FP32 = "fp32"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class Modules:
    """The modules that a model calls, each for the ops in it that are in no module inside it."""

    def __init__(self, seen: Survey, dtype: torch.dtype) -> None:
        self._called = seen.by_name()
        self._dtype = dtype_name(dtype)

    def policy(self, members: Members, name: str = "") -> Policy:
        """Return rules for the modules in float32, and for those that are in them and are not."""
        rules: dict[str, str] = {}
        for called in self._called.values():
            in_float32 = called.name in members
            around = {caller in members for caller in called.callers} or {False}
            if around != {in_float32}:
                rules[called.name] = FP32 if in_float32 else self._dtype
        return Policy(modules=rules, name=name)


class Ops:
    """The ops that autocast sees, by their short names."""

    def policy(self, members: Members, name: str = "") -> Policy:
        """Return the policies by op."""
        return Policy(ops=dict.fromkeys(members, FP32), name=name)


def ops_seen(model: torch.nn.Module, call: Call, region: autocast) -> list[str]:
    """Run a model in a region, and return the ops that could be kept in float32, those first that the table casts down.

    An op that is called by one that has a policy is none of them: autocast does not see it.
    """
    table = get_backend(region.device).policies
    cast = {named(name).qualified for name in table}
    lower = {named(name).qualified for name, policy in table.items() if policy is CastPolicy.LOWER_PRECISION_FP}
    with uncompiled(), _quiet_profiler() as profile:
        try:
            with region:
                call.of_model(model)
        except RuntimeError:
            pass  # what was seen until then is all there is
    names: dict[str, None] = {}
    for event in profile.events():  # type: ignore[no-untyped-call]
        if "::" in event.name and not any(around.name in cast for around in _around(event)):
            names[event.name] = None
    found = [name for name in names if _can_be_float32(name)]
    return [read_op(name).short for name in sorted(found, key=lambda name: name not in lower)]


@contextmanager
def _quiet_profiler() -> Iterator[torch.profiler.profile]:
    """Profile a block; what the profiler writes on stderr when it starts and stops is of no use here."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = "99"
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            yield profile
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]
        else:
            os.environ[_LOG_LEVEL] = before


def _around(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event


def _can_be_float32(name: str) -> bool:
    """Say whether an op computes something of floating-point tensors, and can have the policy."""
    try:
        overloads = ops_with(read_op(name), CastPolicy.FP32)
    except ValueError:
        return False
    return any(_computes(op) for each in overloads if (op := find_op(each)) is not None)


def _computes(op: OpOverload) -> bool:
    schema = op._schema
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return takes and any("Tensor" in str(each.type) and each.alias_info is None for each in schema.returns)
