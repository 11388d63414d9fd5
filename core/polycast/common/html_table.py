"""Tables as HTML, which notebooks show instead of a ``repr``."""

import html
from collections.abc import Iterable, Sequence


def html_table(columns: Sequence[str], rows: Iterable[Iterable[object]], heading: str = "") -> str:
    """Return a table, with its heading above it."""
    lines = [
        "<table>",
        *([f"<caption>{html.escape(heading)}</caption>"] if heading else []),
        f"<thead><tr>{_row('th', columns)}</tr></thead>",
        "<tbody>",
        *(f"<tr>{_row('td', row)}</tr>" for row in rows),
        "</tbody>",
        "</table>",
    ]
    return "\n".join(lines)


def html_lines(lines: Iterable[str]) -> str:
    """Return lines of text, each as a paragraph."""
    return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _row(tag: str, cells: Iterable[object]) -> str:
    return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
