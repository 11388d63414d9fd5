"""The ``polycast`` command. It has the commands that plugins list in their manifests; those about devices are here."""

import sys

from polycast.errors import missing_library
from polycast.plugin import Plugin, lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

_HERE = "polycast_plugins.cli"

plugin = Plugin(
    commands={
        "devices": f"{_HERE}.devices:show",
        "ops": f"{_HERE}.ops:show",
        "build": f"{_HERE}.build:run",
        "doctor": f"{_HERE}.doctor:run",
        "new-backend": f"{_HERE}.new_backend:run",
        "new-plugin": f"{_HERE}.new_plugin:run",
    },
    needs=["testing"],
)


def main() -> None:
    """Run the command line, or say what it lacks."""
    try:
        from .command_line import main
    except ModuleNotFoundError as error:
        if text := missing_library(error):
            sys.exit(f"polycast: the command line cannot be imported. {text}")
        raise
    main()
