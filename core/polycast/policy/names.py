"""Parse the names of ops, policies and dtypes that users write, and name dtypes. Errors suggest the nearest names."""

import difflib
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import torch

from ..torch_internals.dispatcher import CustomOpDef, OpOverload, OpOverloadPacket, all_op_names
from .cast_policy import CastPolicy
from .schemas import entry_problem, find_op, find_overloads, is_op_name

FLOAT32 = "float32"
_EXPECTED = "expected a name such as 'softmax', 'sum.dim_IntList' or 'acme::scale'"
_PYTHON_PREFIX = re.compile(r"^(torch\.nn\.functional|torch|F)\.")
"""Prefixes of ops in Python code: ``torch.softmax``, ``F.softmax``."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)} | {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class OpName(NamedTuple):
    """The name of an op, or of one overload: ``""`` for the overload without a name, None for all overloads."""

    qualified: str
    overload: str | None

    @classmethod
    def of_overload(cls, dispatcher_name: str) -> "OpName":
        """Return the name of one overload, given its dispatcher name."""
        qualified, _, overload = dispatcher_name.partition(".")
        return cls(qualified, overload)

    @property
    def key(self) -> str:
        """The full name, which is equal for all spellings of a name."""
        return self.qualified if self.overload is None else f"{self.qualified}.{self.overload or 'default'}"

    @property
    def short(self) -> str:
        """The name without the namespace ``aten``."""
        return self.key.removeprefix("aten::")

    @property
    def overloads(self) -> list[str]:
        """The dispatcher names of the overloads; none if the running torch lacks them."""
        if self.overload is None:
            return find_overloads(self.qualified)
        name = f"{self.qualified}.{self.overload}" if self.overload else self.qualified
        return [] if find_op(name) is None else [name]


def read_op(op: object) -> OpName:
    """Return the name of an op: a str, an overload, a packet, or what ``torch.library.custom_op`` returned.

    The default namespace is ``aten``. ``sum`` and ``aten::sum`` mean all overloads; ``sum.dim_IntList`` and
    ``sum.default`` mean one.

    Raises:
        TypeError: the object is none of these.
        ValueError: the str is not a valid name.
    """
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return OpName.of_overload(str(op.name()))  # type: ignore[no-untyped-call]
    if isinstance(op, OpOverloadPacket):
        return OpName(op._qualified_op_name, None)
    if not isinstance(op, str):
        raise TypeError(
            "expected a name such as 'mm' or 'acme::scale', an OpOverload such as torch.ops.aten.mm.default, an "
            "OpOverloadPacket such as torch.ops.aten.mm, or what torch.library.custom_op returned; "
            f"got {op!r}"
        )
    namespace, _, rest = op.rpartition("::")
    rest = rest if namespace else _PYTHON_PREFIX.sub("", rest)
    base, dot, overload = rest.partition(".")
    namespace = namespace if "::" in op else "aten"
    if not is_op_name(f"{namespace}::{rest}"):
        raise ValueError(f"{op!r} is not the name of an op: {_EXPECTED}")
    return OpName(f"{namespace}::{base}", None if not dot else "" if overload == "default" else overload)


def known_overloads(name: OpName, *, writing: bool = False) -> list[str]:
    """Return the dispatcher names of an op's overloads; if any are functional, only those, unless `writing`.

    Raises:
        ValueError: torch has no such op.
    """
    overloads = name.overloads
    if not overloads:
        raise ValueError(_unknown(name))
    functional = [each for each in overloads if not _writes(each)]
    return overloads if writing or not functional else functional


def ops_with(name: OpName, policy: CastPolicy) -> list[str]:
    """Return the dispatcher names of the overloads that get a policy which is set for a name.

    These are the overloads that can have the policy; in-place and ``out=`` ones only if the op is banned, matched or
    has no others.

    Raises:
        ValueError: torch has no such op, or it cannot have the policy.
    """
    candidates = known_overloads(name, writing=policy in (CastPolicy.BANNED, CastPolicy.MATCH))
    problems = {each: entry_problem(each, policy) for each in candidates}
    found = [each for each, problem in problems.items() if problem is None]
    if not found:
        raise ValueError(next(problem for problem in problems.values() if problem is not None))
    return found


def read_policy(policy: object, what: str) -> CastPolicy:
    """Return a policy, given as one or by its name in upper or lower case; float32 means "fp32".

    Args:
        policy: the policy or its name.
        what: the subject of the error message.

    Raises:
        ValueError: it is not a policy.
    """
    if isinstance(policy, CastPolicy):
        return policy
    names = [each.value for each in CastPolicy]
    if isinstance(policy, str) and policy.lower() in names:
        return CastPolicy(policy.lower())
    dtype = None
    with suppress(ValueError):
        dtype = read_dtype(policy)
    if dtype is torch.float32:
        return CastPolicy.FP32
    if dtype is not None:
        raise ValueError(
            f"{what} must be a CastPolicy or the name of one, got {policy!r}: for the fast dtype of the region write "
            f"{CastPolicy.LOWER_PRECISION_FP.value!r}"
        )
    raise ValueError(
        f"{what} must be a CastPolicy or the name of one, got {policy!r}"
        f"{nearest_as_text(policy, names) or ': expected one of ' + ', '.join(map(repr, names))}"
    )


def read_dtype(name: object) -> torch.dtype:
    """Return the dtype of a name such as ``bfloat16``, ``bf16`` or ``half``.

    Raises:
        ValueError: it is not the name of a dtype.
    """
    if isinstance(name, torch.dtype):
        return name
    if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
        return _DTYPES[name.removeprefix("torch.")]
    raise ValueError(f"{name!r} is not a dtype{nearest_as_text(name, _DTYPES)}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def nearest(word: object, among: Iterable[str]) -> list[str]:
    """Return up to three of the words most similar to a word: those that contain it, else the most similar first."""
    text = word.lower() if isinstance(word, str) else ""
    known = sorted(among, key=lambda name: (name.startswith("_"), len(name)))
    return [name for name in known if len(text) > 5 and text in name][:3] or difflib.get_close_matches(text, known, n=3)


def hint(word: object, known: Iterable[str]) -> str:
    """Return a sentence for the error of an unknown word: the nearest known one or, if none is near, all."""
    known = list(known)
    alike = nearest(word, known)
    return f"did you mean {alike[0]!r}?" if alike else f"expected one of {', '.join(known)}."


def nearest_as_text(word: object, among: Iterable[str]) -> str:
    """Return the words most similar to a word, as the end of a sentence; an empty text if there are none."""
    found = nearest(word, among)
    return f"; the nearest {'is' if len(found) == 1 else 'are'} {', '.join(map(repr, found))}" if found else ""


def _unknown(name: OpName) -> str:
    base, others = OpName(name.qualified, None).short, find_overloads(name.qualified)
    if others:
        had = ", ".join(repr(OpName.of_overload(other).overload or "default") for other in others)
        overload = name.overload or "default"
        return f"this torch ({torch.__version__}) has no overload {overload!r} of the op {base!r}, which has {had}"
    text = f"this torch ({torch.__version__}) has no op {base!r}"
    known = {each.partition(".")[0].removeprefix("aten::") for each in all_op_names()}
    alike = nearest_as_text(base, sorted(known))
    if name.qualified.startswith("aten::"):
        return text + (alike or f": {_EXPECTED}")
    return f"{text}: load the library that defines it first{alike}"


def _writes(dispatcher_name: str) -> bool:
    op = find_op(dispatcher_name)
    return op is not None and op._schema.is_mutable
