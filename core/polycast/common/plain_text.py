"""Plain text: tables in ASCII, which a stream of any encoding can write."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import RenderableType


def as_text(shown: "RenderableType", width: int) -> str:
    """Render a rich object as plain ASCII text."""
    from rich.console import Console

    console = Console(file=_Ascii(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(shown)
    return in_ascii("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def in_ascii(text: str) -> str:
    """Escape the characters of a text that are not ASCII, as ``ascii()`` does."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


def under_the_head() -> "Box":
    """Return a box style whose only line is below the table's header."""
    from rich.box import Box

    return Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class _Ascii(io.StringIO):
    """A stream whose encoding makes rich draw tables in ASCII."""

    encoding = "ascii"
