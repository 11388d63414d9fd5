"""What ``print`` shows of results: tables as text in ASCII, which a stream of any encoding can write."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import RenderableType


def as_text(shown: "RenderableType", width: int) -> str:
    """Return what rich shows as plain text, in ASCII."""
    from rich.console import Console

    console = Console(file=_Ascii(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(shown)
    return in_ascii("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def in_ascii(text: str) -> str:
    """Return a text whose other characters are escaped, as by ``ascii()``."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


def under_the_head() -> "Box":
    """Return the box of tables whose only line is below the head."""
    from rich.box import Box

    return Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class _Ascii(io.StringIO):
    """A stream for which rich draws tables in ASCII."""

    encoding = "ascii"
