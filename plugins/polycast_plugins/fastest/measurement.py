"""`Measurement`, the time of an op; `Omission`, what was not measured, and why; and the table that shows both."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

FLOAT32 = "float32"
"""The name of the way that others are compared with."""
PREEMPTED = "other processes took the processor"
"""The reason of an omission of cases that were preempted each time that they were measured."""
_LEGEND = "Times relative to float32. ~: noisy, *: extrapolated."


@dataclass(frozen=True)
class Measurement:
    """The time of an op of one size, computed in one way.

    Attributes:
        op: ``"linear"`` (a weight [N, K]), ``"matmul"`` (a weight [K, N]), ``"conv2d"``, ``"small_conv2d"``
            (of one image of at most 20,480 numbers), ``"depthwise_conv2d"``, ``"bmm"``,
            ``"scaled_dot_product_attention"``, ``"scaled_dot_product_attention_backward"``, ``"lstm"``,
            ``"encoder_layer"`` (torch's fused op) or ``"cast"``.
        rows: the rows of the activations: for conv2d the positions of all output images, for bmm and attention the rows
            of each matrix, for lstm those of all steps, for casts the elements.
        way: ``"float32"``, a fast dtype such as ``"bfloat16"``, ``"bfloat16 kernel"`` for the backend's own kernel of
            it, or the kind of a recipe. For casts ``"to bfloat16"`` and ``"from bfloat16"``.
        seconds: of one call.
        size: the elements of the weight, or of what stands for it: 1 for casts.
        noisy: whether a second pass of measuring did not confirm it, or a call with more work took much less time.
        extrapolated: whether it was computed from other rows or sizes, because measuring it would take too long, or
            because float32 takes less than a third of the time there.
    """

    op: str
    rows: int
    way: str
    seconds: float
    size: int = 1
    noisy: bool = False
    extrapolated: bool = False


@dataclass(frozen=True)
class Omission:
    """A way in which an op was not measured, and why."""

    op: str
    way: str
    reason: str


def is_positive(value: object) -> bool:
    """Return whether a value is a positive finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def is_valid(each: Measurement) -> bool:
    """Return whether every attribute has its type and range."""
    kinds = {"op": str, "way": str, "rows": int, "size": int, "noisy": bool, "extrapolated": bool}
    have_types = all(isinstance(getattr(each, name), kind) for name, kind in kinds.items())
    return have_types and each.rows > 0 and each.size > 0 and is_positive(each.seconds)


def as_lines(heading: str, measurements: Sequence[Measurement], omissions: Iterable[Omission]) -> list[str]:
    """Return a line for each row, for places that are too narrow for the table."""
    columns, *rows = table_rows(measurements)
    lines = [heading, ""]
    for op, count, size, *times in rows:
        shown = ", ".join(f"{way} {time}" for way, time in zip(columns[3:], times, strict=True) if time != "-")
        lines.append(f"{op}, {count} row{'s' * (count != '1')}{f' of {size}' if size != '-' else ''}: {shown}")
    return [*lines, "", *table_legend(omissions)]


def table_rows(measurements: Sequence[Measurement]) -> Iterator[list[str]]:
    """Yield the rows of the table, the header first; casts last, with their times."""
    matmuls = [each for each in measurements if each.op != "cast"]
    ways = [way for way in dict.fromkeys(each.way for each in matmuls) if way != FLOAT32]
    yield ["op", "rows", "weight", FLOAT32, *ways]
    found = {(each.op, each.rows, each.size, each.way): each for each in matmuls}
    for op, rows, size in dict.fromkeys((each.op, each.rows, each.size) for each in matmuls):
        base = found.get((op, rows, size, FLOAT32))
        row = [_relative(found.get((op, rows, size, way)), base) for way in ways]
        yield [op, str(rows), _count(size), "-" if base is None else _shown(base), *row]
    casts = {(each.way, each.rows): each for each in measurements if each.op == "cast"}
    for direction, rows in dict.fromkeys((way.partition(" ")[0], rows) for way, rows in casts):
        converted = [casts.get((f"{direction} {way}", rows)) for way in ways]
        yield [f"cast {direction}", str(rows), "-", "-", *("-" if each is None else _shown(each) for each in converted)]


def _relative(each: Measurement | None, base: Measurement | None) -> str:
    if each is None:
        return "-"
    return _shown(each) if base is None else f"{each.seconds / base.seconds:.2f}" + _marks(each)


def _shown(each: Measurement) -> str:
    return _time(each.seconds) + _marks(each)


def _marks(each: Measurement) -> str:
    return "~" * each.noisy + "*" * each.extrapolated


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _count(size: int) -> str:
    return f"{size / 2**20:.3g} M" if size >= 2**20 else f"{size / 2**10:.3g} K" if size >= 2**10 else str(size)


def table_legend(omissions: Iterable[Omission]) -> list[str]:
    """Return the lines below the table: what its signs mean, and what was not measured."""
    return [_LEGEND, *(f"Not measured: {each.op} in {each.way}: {each.reason}" for each in dict.fromkeys(omissions))]
