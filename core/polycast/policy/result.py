"""`Result`: the base of values that print as text and tables, and convert to plain data.

Text is in ASCII, which a stream of any encoding can write; notebooks show HTML.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch

from .cast_policy import CastPolicy
from .names import dtype_name
from .recipe import Recipe

Rows: TypeAlias = Sequence[Sequence[str]]


class Result:
    """The base of a result, a dataclass: ``print`` and notebooks show its heading, tables and lines.

    Subclasses say what these are; without tables and lines, a result shows its ``repr``.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON: dtypes, policies and recipes by name, inf and nan as texts."""
        return {name: plain_data(value) for name, value in vars(self).items()}

    def heading(self) -> str:
        """Return the line above the tables, if there is one."""
        return ""

    def tables(self) -> Iterable[tuple[Sequence[str], Rows]]:
        """Return the names of the columns and the rows of each table. Columns of quantities are shown on the right."""
        return ()

    def lines(self) -> Sequence[str]:
        """Return the lines of text below the tables."""
        return [repr(self)]

    def _repr_html_(self) -> str:
        return "\n".join([*(html_table(*each, self.heading()) for each in self.tables()), html_lines(self.lines())])

    def __str__(self) -> str:
        return self.as_text(self.heading(), self.tables(), self.lines())

    @staticmethod
    def as_text(heading: str, tables: Iterable[tuple[Sequence[str], Rows]], lines: Sequence[str]) -> str:
        """Return a heading, tables and lines as the text of a result."""
        return in_ascii("\n\n".join(filter(None, (heading, *(_text_table(*it) for it in tables), "\n".join(lines)))))


def _text_table(columns: Sequence[str], rows: Rows) -> str:
    aligned = []
    for number, column in enumerate(zip(columns, *rows, strict=True)):
        cells = [in_ascii(cell) for cell in column]
        is_text = number == 0 or not all(re.match(r"[+-]?[\d.]|-$|inf|nan", cell) for cell in cells[1:])
        width = max(map(len, cells))
        aligned.append([cell.ljust(width) if is_text else cell.rjust(width) for cell in cells])
    head, *lines = (f" {'   '.join(line)} " for line in zip(*aligned, strict=True))
    return "\n".join(line.rstrip() for line in (head, "-" * len(head), *lines))


def plain_data(value: Any) -> Any:
    """Return a value for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, CastPolicy):
        return value.value
    if isinstance(value, Recipe):
        return value.short
    if isinstance(value, Mapping):
        return {key: plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    return value


def in_ascii(text: str) -> str:
    """Escape the characters of a text that are not ASCII, as ``ascii()`` does."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


def html_table(columns: Sequence[str], rows: Iterable[Iterable[object]], heading: str = "") -> str:
    """Return a table, with its heading above it."""
    caption = f'<caption style="white-space: pre-line">{_escape(heading)}</caption>\n' if heading else ""
    head, body = _row("th", columns), "\n".join(f"<tr>{_row('td', row)}</tr>" for row in rows)
    return f"<table>\n{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def html_lines(lines: Iterable[str]) -> str:
    """Return lines of text, each as a paragraph."""
    return "\n".join(f"<p>{_escape(line)}</p>" for line in lines)


def _escape(text: str) -> str:
    import html  # imported here, as a script may have a module of this name beside it

    return html.escape(text)


def _row(tag: str, cells: Iterable[object]) -> str:
    return "".join(f"<{tag}>{_escape(str(cell))}</{tag}>" for cell in cells)
