"""What can be kept in float32: modules or ops; and the policy that says so of some of them."""

import contextlib
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine.kernels import refusal
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


class Modules:
    """The modules that a model calls, each for the ops in it that are in no module inside it."""

    def __init__(self, seen: Survey, dtype: torch.dtype) -> None:
        self._called = seen.by_name()
        self._dtype = dtype_name(dtype)

    def policy(self, members: Members, name: str = "") -> Policy:
        """Return rules for the modules in float32, and for those in them that are not, and have parameters.

        What has none (an activation, a dropout) computes as its caller does, unless it is a member itself.
        """
        rules: dict[str, str] = {}
        states: dict[str | None, set[bool]] = {None: {False}}
        for each in self._called.values():
            around = set[bool]().union(*(states.get(caller, set()) for caller in each.callers))
            wanted = each.name in members
            if wanted or each.has_parameters:
                states[each.name] = {wanted}
                if around != {wanted}:
                    rules[each.name] = FP32 if wanted else self._dtype
            else:
                states[each.name] = around
        return Policy(modules=rules, name=name)


class Ops:
    """The ops that autocast sees, by their short names."""

    def policy(self, members: Members, name: str = "") -> Policy:
        """Return the policies by op."""
        return Policy(ops=dict.fromkeys(members, FP32), name=name)


def ops_seen(model: torch.nn.Module, call: Call, region: autocast) -> list[str]:
    """Run a model in a region, and return the ops that could be kept in float32, those first that the table casts down.

    Of those, an op is one if autocast sees it, and not only what it is made of: the model is run with all of them
    banned, without the one that it stops at again, and so on until it does not. The others are those that reach
    the dispatcher below autocast.
    """
    backend = get_backend(region.device)
    lower = [name for name, policy in backend.policies.items() if policy is CastPolicy.LOWER_PRECISION_FP]
    banned = {refusal(backend, name): named(name).qualified for name in lower}
    found: list[str] = []
    while banned:
        ban = Policy(ops=dict.fromkeys(banned.values(), CastPolicy.BANNED))
        try:
            with uncompiled(), region, autocast(region.device, region.fast_dtype, policy=ban):
                call.of_model(model)
        except RuntimeError as error:
            if str(error) not in banned:
                break
            found.append(banned[str(error)])
            banned = {text: name for text, name in banned.items() if name != found[-1]}
        else:
            break
    below = _Below()
    with contextlib.suppress(RuntimeError), uncompiled(), region, below:
        call.of_model(model)
    known = {named(name).qualified for name in backend.policies} | {"aten::_to_copy"}
    found += [name for name in below.names if name not in known and _can_be_float32(name)]
    return [read_op(name).short for name in found]


class _Below(TorchDispatchMode):
    """Notes what reaches the dispatcher below autocast and autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[named(str(func.name())).qualified] = None  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


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
