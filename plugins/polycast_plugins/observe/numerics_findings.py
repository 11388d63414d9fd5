"""Findings about underflow and overflow, from the records of numerics."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from .facts import Facts
from .numerics_records import NumericsRecord
from .policy_remedies import nonfinite_remedy
from .records import Finding
from .remedies import name_of
from .sums import add
from .units import MUCH_UNDERFLOW, module_text, percent

_K = TypeVar("_K")


def underflow(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each module, pass and dtype in which much underflows, the largest share first."""
    groups = _by(facts.numerics, lambda each: (_where(each), each.dtype)).values()
    totals = [(functools.reduce(add, records), records) for records in groups]
    for total, records in sorted(totals, key=lambda each: -each[0].underflow_share):
        if total.count > 0 and total.underflow_share >= MUCH_UNDERFLOW:
            yield _underflow(total, records)


def overflow(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each op, module, pass and dtype in which finite values became inf or nan."""
    for records in _by(facts.numerics, lambda each: (_where(each), each.op, each.dtype)).values():
        total = functools.reduce(add, records)
        if total.overflowed > 0:
            yield _overflow(total)


def _by(records: Iterable[NumericsRecord], key: Callable[[NumericsRecord], _K]) -> dict[_K, list[NumericsRecord]]:
    groups: dict[_K, list[NumericsRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _kind(record: NumericsRecord) -> str:
    if record.role == "backward":
        return "gradients"
    return "weights" if record.of == "weight" else "values"


def _where(record: NumericsRecord) -> str:
    module = module_text(record.module)
    return f"{_kind(record)} {module}" if record.module is None else f"{_kind(record)} of {module}"


def _underflow(total: NumericsRecord, records: list[NumericsRecord]) -> Finding:
    to_zero = f", {percent(total.zeroed / total.count)} to zero" if total.zeroed > 0 else ""
    return Finding(
        "underflow",
        _where(total),
        f"{percent(total.underflow_share)} underflow in {total.dtype}{to_zero}.",
        _underflow_remedy(_kind(total), total.dtype),
        module=total.module,
        ops=tuple(dict.fromkeys(each.op for each in records if each.underflowed > 0)),
        count=total.underflowed,
    )


def _underflow_remedy(kind: str, dtype: str) -> str:
    if dtype in _AS_CLOSE_TO_ZERO:
        also = f"{dtype} has the exponents of float32: scale" if dtype == "bfloat16" else "Scale"
        return f"{also} what they are computed from."
    if kind == "gradients":
        return "Scale the loss (polycast.grad_scaler) or use bfloat16."
    return "Use bfloat16, or keep the module in float32 (polycast.apply_policy)."


_AS_CLOSE_TO_ZERO = ("bfloat16", "float32", "float64")


def _overflow(total: NumericsRecord) -> Finding:
    return Finding(
        "overflow",
        _where(total),
        f"{total.overflowed:,} of {total.count:,} became inf or nan in {total.dtype}, in {total.op}. The largest "
        f"finite magnitude was {total.amax:.3g}.",
        _overflow_remedy(total),
        module=total.module,
        ops=(total.op,),
        count=total.overflowed,
    )


def _overflow_remedy(total: NumericsRecord) -> str:
    if name_of(total.op) in _CASTS and total.role == "forward" and total.dtype not in _AS_CLOSE_TO_ZERO:
        return f"The program casts them to {total.dtype}: scale or clamp them first, or use bfloat16."
    return nonfinite_remedy(total.op, total.dtype, total.role)


_CASTS = ("to", "_to_copy", "copy_")
"""Ops that cast because the program asks for it."""
