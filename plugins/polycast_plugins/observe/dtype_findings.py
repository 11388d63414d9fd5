"""Find where a dtype underflows or overflows, and where the fast dtype is slower than float32."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .facts import Facts, Matmul, MatmulRows, add, is_by_recipe
from .finding import Finding
from .matched_findings import match_text, narrowed_from
from .records import NumericsRecord
from .remedies import SCALE, keep_in_float32, name_of, nonfinite_remedy
from .text import MUCH_UNDERFLOW, module_text, percent

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
            in_casts = {each.source for each in records if each.overflowed > 0}
            matched = narrowed_from(facts.casts, total.op, total.module, total.role, total.dtype)
            yield _overflow(total, [source for source in matched if source in in_casts])


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
        _underflow_remedy(total),
        module=total.module,
        ops=tuple(dict.fromkeys(each.op for each in records if each.underflowed > 0)),
        count=total.underflowed,
    )


def _underflow_remedy(total: NumericsRecord) -> str:
    dtype = total.dtype
    if dtype in _AS_CLOSE_TO_ZERO:
        also = f"{dtype} has the exponents of float32: scale" if dtype == "bfloat16" else "Scale"
        return f"{also} what they are computed from."
    if total.role == "backward":
        return SCALE
    return keep_in_float32(total.op, total.module)


_AS_CLOSE_TO_ZERO = ("bfloat16", "float32", "float64")


def _overflow(total: NumericsRecord, matched: Sequence[str]) -> Finding:
    return Finding(
        "overflow",
        _where(total),
        f"{total.overflowed:,} of {total.count:,} became inf or nan in {total.dtype}, in {total.op}. The largest "
        f"finite magnitude was {total.amax:.3g}.{match_text(matched, total.dtype)}",
        _overflow_remedy(total, bool(matched)),
        module=total.module,
        ops=(total.op,),
        count=total.overflowed,
    )


def _overflow_remedy(total: NumericsRecord, is_matched: bool) -> str:
    if name_of(total.op) in _CASTS and total.role == "forward" and total.dtype not in _AS_CLOSE_TO_ZERO:
        return f"The program casts them to {total.dtype}: scale or clamp them first, or use bfloat16."
    return nonfinite_remedy(total.op, total.dtype, total.role, total.module, is_matched)


_CASTS = ("to", "_to_copy", "copy_")
"""Ops that cast because the program asks for it."""


_FLOAT32 = "float32"
_FASTEST = "fastest"
"""The kind of the recipe that computes in the faster one of two dtypes."""
_INFERENCE_ONLY = ("int8", "float8")
_SLOWER = 1.05
"""The smallest ratio of times that counts."""
_MAIN_SHARE = 0.8
"""The share of the time in the matmuls whose rows a finding names."""


def slow_dtypes(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each fast dtype that made the run slower than float32 would, or that is emulated."""
    for device, dtypes in facts.run.devices.items():
        for dtype in dtypes:
            yield from _finding(facts, device, dtype)


def _finding(facts: Facts, device: str, dtype: str) -> Iterator[Finding]:
    reason = facts.run.emulated.get(f"{device} {dtype}")
    only_device = len(facts.run.devices) == 1
    ran = [each for each in facts.matmuls if each.device == device or (only_device and not each.device)]
    slow = [each for each in ran if each.dtype == dtype and not is_by_recipe(each)]
    if ran and not slow:  # recipes or policies avoided the dtype
        return
    times = _timed(slow, facts.matmuls) or _estimated(slow, dtype)
    if times is None:
        if reason is not None:
            yield Finding("slow_dtype", device, f"{dtype} is emulated: {reason}.", _UNMEASURED)
        return
    lost = times.fast - times.float32
    if times.fast < _SLOWER * times.float32 or lost < (_SLOWER - 1) * (times.fast + _seconds_of_others(ran, slow)):
        return
    emulated = "" if reason is None else f"{dtype} is emulated: {reason}. "
    rows = _rows_text(slow, dtype)
    yield Finding(
        "slow_dtype",
        device,
        f"{emulated}{dtype} matmuls{rows} take {times.fast / times.float32:.2g} of float32's time on {device}, "
        f"{times.source}.",
        _remedy(slow, dtype),
        ops=tuple(dict.fromkeys(each.op for each in slow)),
        count=sum(each.calls for each in slow),
    )


_UNMEASURED = (
    'It saves memory but no time. For speed use `recipe="fastest"`, another dtype or another device; '
    "`polycast profile` measures what is fast."
)


def _way(matmul: Matmul) -> str:
    """Return the way in which a matmul was computed, as profiles name it."""
    kind, _, way = (matmul.recipe if is_by_recipe(matmul) else "").partition(":")
    return way if kind == _FASTEST else kind or matmul.dtype


@dataclass(frozen=True)
class _Times:
    """The seconds of the same matmuls in the fast dtype and in float32, and where they are from."""

    fast: float
    float32: float
    source: str


def _timed(slow: Iterable[Matmul], everything: Iterable[Matmul]) -> _Times | None:
    """Return the times if the run computed the same ops on as many rows in both dtypes, and was timed."""
    rates: dict[object, tuple[float, float]] = {}
    for each in everything:
        if each.dtype == _FLOAT32 and each.seconds > 0 and each.flops > 0:
            seconds, flops = rates.get(_alike(each), (0.0, 0.0))
            rates[_alike(each)] = seconds + each.seconds, flops + each.flops
    fast = float32 = 0.0
    for each in slow:
        if each.seconds > 0 and _alike(each) in rates:
            seconds, flops = rates[_alike(each)]
            fast, float32 = fast + each.seconds, float32 + each.flops * seconds / flops
    return _Times(fast, float32, "as timed in this run") if float32 > 0 else None


def _alike(matmul: Matmul) -> object:
    return matmul.op, matmul.phase, frozenset((each.op, each.rows) for each in matmul.rows)


def _estimated(slow: Iterable[Matmul], dtype: str) -> _Times | None:
    fast = float32 = 0.0
    for each in _known(slow, dtype):
        fast, float32 = fast + each.estimates[dtype], float32 + each.estimates[_FLOAT32]
    return _Times(fast, float32, "by its profile") if float32 > 0 else None


def _known(slow: Iterable[Matmul], dtype: str) -> Iterator[MatmulRows]:
    for matmul in slow:
        for each in matmul.rows:
            if {dtype, _FLOAT32} <= {*each.estimates}:
                yield each


def _seconds_of_others(ran: Iterable[Matmul], slow: list[Matmul]) -> float:
    """Return the estimated seconds of the other matmuls in the run."""
    return sum(each.estimates.get(_way(matmul), 0.0) for matmul in ran if matmul not in slow for each in matmul.rows)


def _rows_text(slow: Iterable[Matmul], dtype: str) -> str:
    """Return the rows of the matmuls that take most of the time, as ``" of 1 to 128 rows"``."""
    weights: dict[int, float] = {}
    for matmul in slow:
        for each in matmul.rows:
            weights[each.rows] = weights.get(each.rows, 0.0) + each.estimates.get(dtype, each.flops)
    total, main, so_far = sum(weights.values()), list[int](), 0.0
    for rows in sorted(weights, key=lambda rows: -weights[rows]):
        if so_far < _MAIN_SHARE * total:
            main.append(rows)
            so_far += weights[rows]
    if not main:
        return ""
    first, last = min(main), max(main)
    return f" of {first:,} to {last:,} rows" if first < last else f" of {first:,} row{'s' * (first > 1)}"


def _remedy(slow: list[Matmul], dtype: str) -> str:
    known = list(_known(slow, dtype))
    trains = any(each.phase == "backward" for each in slow)
    float32, fast = (sum(each.estimates[way] for each in known) for way in (_FLOAT32, dtype))
    faster = []
    declined = {each.recipe for each in slow}
    for recipe in (_FASTEST, *(() if trains else _INFERENCE_ONLY)):
        if recipe in declined:
            continue
        seconds = sum(_seconds_by(recipe, each.estimates, dtype) for each in known)
        if seconds * _SLOWER < fast:
            note = "" if recipe == _FASTEST else ", for inference"
            faster.append(f'`recipe="{recipe}"` (about {seconds / float32:.2g} of float32\'s time{note})')
    if not faster:
        return "Compute them in float32." if _FASTEST in declined else '`recipe="fastest"` or float32 avoids that.'
    return f"{' or '.join(faster)} avoid{'s' * (len(faster) == 1)} that."


def _seconds_by(recipe: str, estimates: Mapping[str, float], dtype: str) -> float:
    """Return the estimated seconds by a recipe, which leaves what it does not compute in the fast dtype."""
    if recipe == _FASTEST:
        return min(estimates[way] for way in (_FLOAT32, dtype, f"{dtype} kernel") if way in estimates)
    return estimates.get(recipe, estimates[dtype])
