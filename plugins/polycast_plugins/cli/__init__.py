"""The ``polycast`` command. It has the commands that plugins list in their manifests; those about devices are here."""

from typing import TYPE_CHECKING

from polycast.plugin import Plugin, lazy_names

if TYPE_CHECKING:
    from .command_line import app as app
    from .command_line import main as main
    from .output import check_output as check_output
    from .terminal import console as console
    from .terminal import library_errors as library_errors
    from .terminal import print_json as print_json
    from .terminal import print_line as print_line

_PLACES = {
    "app": "command_line",
    "check_output": "output",
    "console": "terminal",
    "library_errors": "terminal",
    "main": "command_line",
    "print_json": "terminal",
    "print_line": "terminal",
}
"""The module of each name for commands of other plugins; imported at the first use, since typer is slow to import."""

__all__ = [*_PLACES]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, _PLACES)

_HERE = "polycast_plugins.cli"

plugin = Plugin(
    commands={
        "devices": f"{_HERE}.devices:show",
        "ops": f"{_HERE}.ops:show",
        "build": f"{_HERE}.build:run",
        "doctor": f"{_HERE}.doctor:run",
        "new-backend": f"{_HERE}.new_backend:run",
    },
)
