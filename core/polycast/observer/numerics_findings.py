"""Findings about underflow and overflow, from the records of numerics."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from .facts import Facts
from .numerics_records import NumericsRecord
from .policy_remedies import nonfinite_remedy
from .records import Finding
from .sums import add
from .units import module_text

_K = TypeVar("_K")
_LEAST_SHARE = 0.1
"""The share of underflow from which on it is a finding."""


def underflow(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each module, pass and dtype in which much underflows, the largest share first."""
    found = []
    for (module, what, dtype), records in _by(
        facts.numerics, lambda each: (each.module, _kind(each), each.dtype)
    ).items():
        total = functools.reduce(add, records)
        if total.count > 0 and total.underflowed >= _LEAST_SHARE * total.count:
            ops = tuple(dict.fromkeys(each.op for each in records if each.underflowed > 0))
            found.append((total.underflowed / total.count, _underflow(module, what, dtype, total, ops)))
    yield from (finding for _, finding in sorted(found, key=lambda each: -each[0]))


def overflow(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each op, module, pass and dtype in which finite values became inf or nan."""
    for records in _by(facts.numerics, lambda each: (each.module, each.op, each.role, each.dtype)).values():
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


def _underflow(module: str | None, what: str, dtype: str, total: NumericsRecord, ops: tuple[str, ...]) -> Finding:
    to_zero = f", {_share(total.zeroed, total.count)} to zero" if total.zeroed > 0 else ""
    return Finding(
        "underflow",
        module_text(module),
        f"{_share(total.underflowed, total.count)} of the {what} underflow in {dtype}{to_zero}.",
        _underflow_remedy(what, dtype),
        module=module,
        ops=ops,
        count=total.underflowed,
    )


def _underflow_remedy(what: str, dtype: str) -> str:
    if dtype in _AS_CLOSE_TO_ZERO:
        return f"{dtype} has the exponents of float32: scale what they are computed from."
    if what == "gradients":
        return "Scale the loss (polycast.grad_scaler) or use bfloat16."
    return "Use bfloat16, or keep the module in float32 (polycast.apply_policy)."


_AS_CLOSE_TO_ZERO = ("bfloat16", "float32", "float64")


def _overflow(total: NumericsRecord) -> Finding:
    values = "value" if total.overflowed == 1 else "values"
    return Finding(
        "overflow",
        module_text(total.module),
        f"{total.overflowed:,} finite {values} became inf or nan in {total.dtype}, "
        f"{_share(total.overflowed, total.count)} of those of {total.op} ({total.role}). The largest finite magnitude "
        f"was {total.amax:.3g}.",
        nonfinite_remedy(total.op, total.dtype, total.role),
        module=total.module,
        ops=(total.op,),
        count=total.overflowed,
    )


def _share(part: int, whole: int) -> str:
    """Format a share; only none of the whole is 0 %, and only all of it 100 %."""
    percent = 100 * part / whole
    if part < whole and percent >= 99.5:
        return "over 99 %"
    return f"{percent:.0f} %" if percent >= 10 or not part else f"{percent:.2g} %"
