"""Tables as HTML, which notebooks show instead of a ``repr``."""

from collections.abc import Iterable, Sequence


def html_table(columns: Sequence[str], rows: Iterable[Iterable[object]], heading: str = "") -> str:
    """Return a table, with its heading above it."""
    lines = [
        "<table>",
        *([f"<caption>{_escape(heading)}</caption>"] if heading else []),
        f"<thead><tr>{_row('th', columns)}</tr></thead>",
        "<tbody>",
        *(f"<tr>{_row('td', row)}</tr>" for row in rows),
        "</tbody>",
        "</table>",
    ]
    return "\n".join(lines)


def html_lines(lines: Iterable[str]) -> str:
    """Return lines of text, each as a paragraph."""
    return "\n".join(f"<p>{_escape(line)}</p>" for line in lines)


def _escape(text: str) -> str:
    import html  # imported here, as a script may have a module of this name beside it

    return html.escape(text)


def _row(tag: str, cells: Iterable[object]) -> str:
    return "".join(f"<{tag}>{_escape(str(cell))}</{tag}>" for cell in cells)
