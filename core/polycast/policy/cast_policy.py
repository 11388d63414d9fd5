"""Cast policies: what autocast does with the inputs of an op, and the tables that say so for each op."""

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType


class CastPolicy(enum.Enum):
    """What happens to the eligible inputs of an op; the first five mean what torch's ATen/autocast_mode.h says.

    An input is eligible when it is a floating-point tensor on the region's device and not float64.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every eligible input to the region's fast dtype."""
    FP32 = "fp32"
    """Cast every eligible input to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Cast nothing; if the first input is eligible, give float32 to an optional ``dtype`` that the caller left out."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Cast nothing; call the overload that takes a ``dtype``, with float32 if the first input is eligible."""
    PROMOTE = "promote"
    """Cast the eligible inputs to float32 if their dtypes differ; inputs of one dtype stay as they are."""
    BANNED = "banned"
    """Raise RuntimeError, for the op is not safe in reduced precision."""
    PASSTHROUGH = "passthrough"
    """Run the op on its inputs as they are."""


def policy_table(ops: Mapping[CastPolicy, Iterable[str]]) -> Mapping[str, CastPolicy]:
    """Turn lists of ops, one for each policy, into the table that a backend supplies.

    Args:
        ops: for each policy the names of its ops as the dispatcher has them, such as ``"aten::mm"`` or
            ``"aten::norm.Scalar"``.

    Returns:
        A read-only mapping from op name to policy.

    Raises:
        ValueError: an op is named twice.
        TypeError: a name is where names should be.

    Example:
        >>> from polycast import CastPolicy, policy_table
        >>> dict(policy_table({CastPolicy.FP32: ["aten::exp", "aten::log"]}))
        {'aten::exp': <CastPolicy.FP32: 'fp32'>, 'aten::log': <CastPolicy.FP32: 'fp32'>}
    """
    table: dict[str, CastPolicy] = {}
    for policy, names in ops.items():
        if isinstance(names, str):
            raise TypeError(f"names of ops must be in a list or a tuple, got {names!r}: write ({names!r},)")
        for name in names:
            if name in table:
                raise ValueError(
                    f"{name!r} is named twice, as {table[name].name} and as {policy.name}: an op has one policy. "
                    "Remove one of the two."
                )
            table[name] = policy
    return MappingProxyType(table)
