"""`policy_table`: the table of a backend, from lists of ops."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .cast_policy import CastPolicy


def policy_table(ops: Mapping[CastPolicy, Iterable[str]]) -> Mapping[str, CastPolicy]:
    """Turn lists of ops, one for each policy, into the table that a backend supplies.

    Args:
        ops: for each policy, its ops: by dispatcher name, such as ``"aten::mm"`` or ``"aten::norm.Scalar"``, or by a
            name without ``aten::``, as in a :class:`polycast.Policy`: ``"softmax"`` means each functional overload that
            can have the policy and is not named itself.

    Returns:
        A read-only mapping from op name to policy.

    Raises:
        ValueError: an op is named twice, or cannot have the policy of its short name.
        TypeError: a list of names is a str.

    Example:
        >>> import polycast
        >>> dict(polycast.plugin.policy_table({polycast.CastPolicy.FP32: ["aten::exp", "aten::log"]}))
        {'aten::exp': <CastPolicy.FP32: 'fp32'>, 'aten::log': <CastPolicy.FP32: 'fp32'>}
    """
    table: dict[str, CastPolicy] = {}
    of_short_names: dict[str, CastPolicy] = {}
    for policy, names in ops.items():
        if isinstance(names, str):
            raise TypeError(f"names of ops must be in a list or a tuple, got {names!r}: write ({names!r},)")
        for name in names:
            if "::" in name:
                _add(table, name, policy)
                continue
            from .names import ops_with, read_op  # the tables of torch have no short names

            op = read_op(name)
            # A name that this torch lacks stands for itself, since another torch may have it.
            overloads = ops_with(op, policy) if op.overloads else [op.key.removesuffix(".default")]
            for overload in overloads:
                _add(of_short_names if op.overload is None else table, overload, policy)
    return MappingProxyType({**of_short_names, **table})


def _add(table: dict[str, CastPolicy], name: str, policy: CastPolicy) -> None:
    if name in table:
        raise ValueError(
            f"{name!r} is named twice, as {table[name].name} and as {policy.name}: an op has one policy. "
            "Remove one of the two."
        )
    table[name] = policy
