"""Names as people say them: of ops, with or without namespace and overload, of policies and of dtypes.

What reads a name from a user reads it here, and what is not one is told with the names nearest to it.
"""

import difflib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..torch_internals.names import CustomOpDef, OpOverload, OpOverloadPacket, all_op_names
from .cast_policy import CastPolicy
from .schemas import find_op, find_overloads
from .validation import entry_problem

_EXPECTED = "expected a name such as 'softmax', 'sum.dim_IntList' or 'acme::scale'"
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)} | {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


MOST_PROBLEMS = 20
"""After how many problems the reading of a policy stops: to find the nearest names takes time."""


class OpName(NamedTuple):
    """What a name means: an op and, where it names one, its overload (``""``: the one that the dispatcher gives none).

    Without an overload it means all of them.
    """

    qualified: str
    overload: str | None

    @property
    def key(self) -> str:
        """The name in full: equal for the names that mean the same, whichever way they are written."""
        return self.qualified if self.overload is None else f"{self.qualified}.{self.overload or 'default'}"

    @property
    def short(self) -> str:
        """The name as people say it."""
        return self.key.removeprefix("aten::")

    @property
    def overloads(self) -> list[str]:
        """The overloads that are meant, by their names in the dispatcher; none if the running torch lacks them."""
        if self.overload is None:
            return find_overloads(self.qualified)
        name = f"{self.qualified}.{self.overload}" if self.overload else self.qualified
        return [] if find_op(name) is None else [name]


def named(dispatcher_name: str) -> OpName:
    """Return the name of one overload, by its name in the dispatcher."""
    qualified, _, overload = dispatcher_name.partition(".")
    return OpName(qualified, overload)


def read_op(op: object) -> OpName:
    """Return what is meant by an op: a name, an overload, a packet, or what ``torch.library.custom_op`` returned.

    The namespace is ``aten`` where none is said. ``sum`` and ``aten::sum`` mean all overloads, ``sum.dim_IntList`` is
    one of them, and so is ``sum.default``, which the dispatcher has no name for.

    Raises:
        TypeError: not something that names an op.
        ValueError: not a name, whatever ops there are.
    """
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return named(str(op.name()))  # type: ignore[no-untyped-call]
    if isinstance(op, OpOverloadPacket):
        return OpName(op._qualified_op_name, None)
    if not isinstance(op, str):
        raise TypeError(
            "expected a name such as 'mm' or 'acme::scale', an OpOverload such as torch.ops.aten.mm.default, an "
            "OpOverloadPacket such as torch.ops.aten.mm, or what torch.library.custom_op returned; "
            f"got {op!r}"
        )
    namespace, _, rest = op.rpartition("::")
    base, dot, overload = rest.partition(".")
    namespace = namespace if "::" in op else "aten"
    if not (namespace.isidentifier() and base.isidentifier() and (overload.isidentifier() or not dot)):
        raise ValueError(f"{op!r} is not the name of an op: {_EXPECTED}")
    return OpName(f"{namespace}::{base}", None if not dot else "" if overload == "default" else overload)


def known_overloads(name: OpName, *, writing: bool = False) -> list[str]:
    """Return the overloads that a name means, by their names in the dispatcher.

    Of several, those that write to their inputs are left out, unless all do or they are asked for.

    Raises:
        ValueError: torch has no such op.
    """
    overloads = name.overloads
    if not overloads:
        raise ValueError(_unknown(name))
    functional = [each for each in overloads if not _writes(each)]
    return overloads if writing or not functional else functional


def ops_with(name: OpName, policy: CastPolicy) -> list[str]:
    """Return the overloads that a name gives a policy, by their names in the dispatcher.

    A name without an overload means those that can have the policy. In-place and ``out=`` ones are left alone, save
    where the op is banned or has no others.

    Raises:
        ValueError: torch has no such op; or it cannot have the policy.
    """
    candidates = known_overloads(name, writing=policy is CastPolicy.BANNED)
    problems = {each: entry_problem(each, policy) for each in candidates}
    found = [each for each, problem in problems.items() if problem is None]
    if not found:
        raise ValueError(next(problem for problem in problems.values() if problem is not None))
    return found


def read_policy(policy: object, what: str) -> CastPolicy:
    """Return a policy, which may be its name in text, in upper or lower case.

    Raises:
        ValueError: not a policy; `what` is what the message says that it would be.
    """
    if isinstance(policy, CastPolicy):
        return policy
    names = [each.value for each in CastPolicy]
    if isinstance(policy, str) and policy.lower() in names:
        return CastPolicy(policy.lower())
    raise ValueError(
        f"{what} must be a CastPolicy or the name of one, got {policy!r}"
        f"{_nearest(policy, names) or ': expected one of ' + ', '.join(map(repr, names))}"
    )


def read_dtype(name: object) -> torch.dtype:
    """Return the dtype of a name such as ``bfloat16``, ``bf16`` or ``half``.

    Raises:
        ValueError: not the name of a dtype.
    """
    if isinstance(name, torch.dtype):
        return name
    if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
        return _DTYPES[name.removeprefix("torch.")]
    raise ValueError(f"{name!r} is not a dtype{_nearest(name, _DTYPES)}")


def nearest(word: object, among: Iterable[str]) -> list[str]:
    """Return the words that look most like one, the most alike first; at most three."""
    return difflib.get_close_matches(word.lower(), list(among), n=3) if isinstance(word, str) else []


def error_of(problems: list[str]) -> ValueError:
    """Return the error that lists what is wrong with a policy."""
    stopped = [f"reading stopped after {MOST_PROBLEMS} problems"] if len(problems) >= MOST_PROBLEMS else []
    return ValueError("; ".join(problems + stopped))


def _nearest(word: object, among: Iterable[str]) -> str:
    found = nearest(word, among)
    return f"; the nearest {'is' if len(found) == 1 else 'are'} {', '.join(map(repr, found))}" if found else ""


def _unknown(name: OpName) -> str:
    others = find_overloads(name.qualified)
    if others:
        had = ", ".join(repr(named(other).overload or "default") for other in others)
        base, overload = OpName(name.qualified, None).short, name.overload or "default"
        return f"this torch ({torch.__version__}) has no overload {overload!r} of the op {base!r}, which has {had}"
    text = f"this torch ({torch.__version__}) has no op {name.short!r}"
    known = {each.partition(".")[0].removeprefix("aten::") for each in all_op_names()}
    alike = _nearest(OpName(name.qualified, None).short, sorted(known))
    if name.qualified.startswith("aten::"):
        return text + (alike or f": {_EXPECTED}")
    return f"{text} now: load the library that defines it first{alike}"


def _writes(dispatcher_name: str) -> bool:
    op = find_op(dispatcher_name)
    return op is not None and op._schema.is_mutable
