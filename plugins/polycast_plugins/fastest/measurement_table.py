"""Show measurements as a table: the time of float32, and the times of other ways relative to it."""

from collections.abc import Iterable, Iterator, Sequence

from .measurement import FLOAT32, Measurement, Omission

_LEGEND = "Times relative to float32. ~: noisy, *: extrapolated."


def as_lines(heading: str, measurements: Sequence[Measurement], omissions: Iterable[Omission]) -> list[str]:
    """Return a line for each row, for places that are too narrow for the table."""
    columns, *rows = cells(measurements)
    lines = [heading, ""]
    for op, count, size, *times in rows:
        shown = ", ".join(f"{way} {time}" for way, time in zip(columns[3:], times, strict=True) if time != "-")
        lines.append(f"{op}, {count} row{'s' * (count != '1')}{f' of {size}' if size != '-' else ''}: {shown}")
    return [*lines, "", *legend(omissions)]


def cells(measurements: Sequence[Measurement]) -> Iterator[list[str]]:
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


def legend(omissions: Iterable[Omission]) -> list[str]:
    """Return the lines below the table: what its signs mean, and what was not measured."""
    return [_LEGEND, *(f"Not measured: {each.op} in {each.way}: {each.reason}" for each in dict.fromkeys(omissions))]
