"""The result of ``explain``: a value with a text for people and a dict for programs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..policy.cast_policy import CastPolicy
from ..policy.names import dtype_name
from ..policy.result import Result, html_lines, html_table

NO_RULE = "none"
MIXED_DTYPES = "mixed dtypes"
OTHERS_KERNEL = "a kernel that is not polycast's"

_MEANING = {
    None: "it runs unchanged, and autocast applies to its inner ops",
    CastPolicy.LOWER_PRECISION_FP: "its inputs are cast to {fast}",
    CastPolicy.FP32: "its inputs are cast to float32",
    CastPolicy.FP32_SET_OPT_DTYPE: "its dtype defaults to float32",
    CastPolicy.FP32_APPEND_DTYPE: "the overload that takes a dtype is called, with float32",
    CastPolicy.PROMOTE: "its inputs are cast to float32 if their dtypes differ",
    CastPolicy.LOWER_FIRST: "its first input is cast to {fast}",
    CastPolicy.MATCH: "its inputs are cast where torch would refuse their dtypes",
    CastPolicy.BANNED: "it raises RuntimeError",
    CastPolicy.PASSTHROUGH: "it runs on unchanged inputs",
}


@dataclass(frozen=True)
class Argument:
    """The effect of autocast on one tensor among the arguments of an op.

    Attributes:
        name: the argument's name in the op's schema, with the position in a list: ``tensors[1]``.
        dtype: the dtype of the argument.
        seen: the dtype that the op sees.
    """

    name: str
    dtype: torch.dtype
    seen: torch.dtype

    @property
    def is_cast(self) -> bool:
        """Whether the tensor is cast."""
        return self.dtype is not self.seen

    def __str__(self) -> str:
        before, after = dtype_name(self.dtype), dtype_name(self.seen)
        return f"{self.name}: {before} -> {after}" if self.is_cast else f"{self.name}: {before}, unchanged"


@dataclass(frozen=True)
class Explanation(Result):
    """The effect of autocast on an op, and the rule that decides it; ``str()`` formats it.

    Attributes:
        op: the overload, by its name in the dispatcher.
        device_type: the device whose autocast is explained.
        enabled: whether autocast is enabled; if not, nothing is cast, and the rule is the one that would decide.
        dtype: the fast dtype.
        policy: the op's policy; None: it runs unchanged, and autocast applies to the ops that it is made of.
        rule: the rule that decides: ``"region's policy"``, ``"register_op for <device>"``, ``"register_op"``,
            ``"backend's table"``, ``"extension"``, ``"mixed dtypes"`` (the backend's `matched_ops`), ``"none"``, or
            ``"a kernel that is not polycast's"``.
        rule_name: the name of the rule, such as that of the region's :class:`Policy`, or the distribution of an
            extension.
        arguments: what happens to each tensor; None if no arguments were given.
        reached: whether autocast sees the call, because one of the tensors is on the device.
        set_dtype: the ``dtype`` that the policy adds to this call, if any.
        calls: the overload that is called in the end.
        refusal: the error of the call, if the op is banned.
        recipe: the recipe that applies to the op, if any: ``"int8"``.
        declined: why the recipe does not compute the op, which runs in the fast dtype; None if it does. Without
            arguments: why it computes no call.
        way: the way in which the recipe computes the call, if it has several: ``"float32"``; empty without arguments.
        reason: why it is computed in that way; of a recipe with a calibration, whether the weight is equalized.
        package: the distribution whose kernel computes the call; empty if torch's does, or without arguments.
        others: explanations of the other overloads of the name, if no arguments were given.
    """

    op: str
    device_type: str
    enabled: bool
    dtype: torch.dtype
    policy: CastPolicy | None
    rule: str
    rule_name: str = ""
    arguments: tuple[Argument, ...] | None = None
    reached: bool = True
    set_dtype: torch.dtype | None = None
    calls: str = ""
    refusal: str | None = None
    recipe: str = ""
    declined: str | None = None
    way: str = ""
    reason: str = ""
    package: str = ""
    others: "tuple[Explanation, ...]" = ()

    @property
    def _heading(self) -> str:
        region = f"a region of {dtype_name(self.dtype)}" if self.enabled else "autocast is off"
        return f"{self.op} on {self.device_type}, {region}"

    def __str__(self) -> str:
        lines = [self._heading]
        for each in (self, *self.others):
            lines.append(each._decision() if each is self else f"{each.op}: {each._decision()}")
        if self.arguments is not None:
            lines += [f"  {line}" for line in self._outcome()]
        return "\n".join(lines)

    def lines(self) -> list[str]:
        """Return the text as lines."""
        return str(self).splitlines()

    def _repr_html_(self) -> str:
        rows = [(each.op, *each._parts()) for each in (self, *self.others)]
        outcome = () if self.arguments is None else self._outcome()
        return "\n".join([html_table(("op", "policy", "rule", "effect"), rows, self._heading), html_lines(outcome)])

    def _decision(self) -> str:
        policy, rule, effect = self._parts()
        return f"{policy} ({rule}): {effect}"

    def _parts(self) -> tuple[str, str, str]:
        """Return the policy, the rule and the effect as text."""
        rule = f"{self.rule} {self.rule_name!r}" if self.rule_name else self.rule
        if self.rule == OTHERS_KERNEL:
            return "no policy", rule, "it decides"
        meaning = _MEANING[self.policy].format(fast=dtype_name(self.dtype))
        if self.recipe and self.declined is not None:
            meaning += f", for the recipe {self.recipe} declines: {self.declined}"
        elif self.recipe:
            here = self.arguments is not None and self.enabled and self.reached
            how = f" in {self.way}: {self.reason}" if self.way else f", {self.reason}" if self.reason else ""
            by = "" if self.package in ("", "polycast") else f" by {self.package}"
            meaning = f"the recipe {self.recipe} computes it{by}{how}" + ("" if here else f", or {meaning}")
        if self.policy is None:
            return "no policy", rule, meaning
        return self.policy.value, rule, meaning + ("" if self.enabled else ", in a region")

    def _outcome(self) -> Iterator[str]:
        assert self.arguments is not None
        if not self.reached:
            yield f"no tensor is on {self.device_type}: autocast for it does not see this call"
        elif self.refusal is not None:
            yield f"RuntimeError: {self.refusal}"
        else:
            yield from map(str, self.arguments)
            if self.set_dtype is not None:
                yield f"dtype: {dtype_name(self.set_dtype)} is given"
            if self.calls != self.op:
                yield f"{self.calls} is called"
