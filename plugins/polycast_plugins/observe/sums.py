"""Add and subtract records: those with equal identities are merged, and their counts added."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from .matmul_records import Matmul, MatmulRows
from .numerics_records import NumericsRecord
from .records import Cast, Chain, Compiled, Counts, Decision, Finding, Flow, LowBit, Module, Op, Region

_R = TypeVar("_R")

_IDENTITY: dict[type[Any], tuple[str, ...]] = {
    Op: ("op", "phase"),
    Decision: ("device", "policy", "rule", "rule_name"),
    Module: ("module",),
    Cast: ("op", "phase", "module", "source", "target", "of"),
    Region: ("where", "device", "enabled", "dtype", "reason"),
    Compiled: ("region", "module"),
    LowBit: ("device", "recipe", "op", "declined"),
    Matmul: ("op", "phase", "module", "device", "recipe", "declined", "dtype"),
    MatmulRows: ("op", "rows"),
    Chain: ("kind", "ops", "module", "dtype"),
    NumericsRecord: ("module", "op", "role", "dtype", "of", "source"),
    Flow: (
        *("op", "module", "device", "policy", "source", "source_module"),
        *("dtype", "cast", "is_first", "asked_from"),
    ),
    Finding: ("kind", "where", "ops"),
}
"""The fields that identify a record, by its class; the others are its counts."""

_MAXIMA = ("amax",)
"""The fields that are maxima: a sum has the larger one, and a difference that of the minuend."""


def identity_of(record: Any) -> tuple[Any, ...]:
    """Return what records of a class have in common if they are about the same."""
    return tuple(getattr(record, name) for name in _IDENTITY[type(record)])


def combine(left: Iterable[_R], right: Iterable[_R] = (), sign: int = 1) -> tuple[_R, ...]:
    """Merge records, with the counts of `right` added, or subtracted (sign -1). Records without counts are left out."""
    found: dict[tuple[Any, ...], _R] = {}
    for record, factor in (*((each, 1) for each in left), *((each, sign) for each in right)):
        key = identity_of(record)
        found[key] = add(found.get(key), record, factor)
    return tuple(record for record in found.values() if any(_numbers(record)))


def add(record: _R | None, other: _R, factor: int = 1) -> _R:
    """Return a record with the counts of another, times `factor`, added to its own."""
    changed: dict[str, Any] = {}
    for each in fields(other):  # type: ignore[arg-type]
        mine, value = getattr(record, each.name, None), getattr(other, each.name)
        if isinstance(value, bool) or each.name in _IDENTITY.get(type(other), ()):
            continue
        if each.name in _MAXIMA:
            changed[each.name] = max(mine or 0.0, value) if factor > 0 else mine or 0.0
        elif isinstance(value, (int, float)):
            changed[each.name] = (mine or 0) + factor * value
        elif isinstance(value, Mapping):
            sums = {key: (mine or {}).get(key, 0) + factor * value.get(key, 0) for key in {**(mine or {}), **value}}
            changed[each.name] = {key: count for key, count in sums.items() if count}
        elif isinstance(value, Counts):
            changed[each.name] = add(mine, value, factor)
        elif isinstance(value, tuple) and type(next(iter(mine or value), None)) in _IDENTITY:
            changed[each.name] = combine(mine or (), value, factor)
        elif mine:
            changed[each.name] = mine
    result = replace(other, **changed)  # type: ignore[type-var]
    return with_main_decision(result) if isinstance(result, Op) else result  # type: ignore[return-value]


def with_main_decision(op: Op) -> Op:
    """Return an op with the decision for most of its calls as its own."""
    if not op.decisions:
        return op
    decisions = tuple(sorted(op.decisions, key=lambda each: -abs(each.calls)))
    main = decisions[0]
    return replace(op, decisions=decisions, policy=main.policy, rule=main.rule, rule_name=main.rule_name)


def _numbers(value: Any) -> Iterator[float]:
    for each in fields(value):
        item = getattr(value, each.name)
        if isinstance(item, (int, float)) and not isinstance(item, bool) and each.name not in _MAXIMA:
            yield item
        elif isinstance(item, Mapping):
            yield from item.values()
        elif isinstance(item, Counts):
            yield from _numbers(item)
