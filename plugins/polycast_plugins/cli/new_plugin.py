"""``polycast new-plugin``: write a package with a plugin, to edit and publish."""

from typing import Annotated

import typer

from .scaffold import check_name, write_package
from .terminal import library_errors


def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of the package and of its command, such as acme-weights.")
    ],
) -> None:
    """Write a package with a plugin: a function of polycast, a command, tests and README."""
    with library_errors():
        names = check_name(name)
        names["description"] = f"A plugin of polycast: a function, and the command {names['distribution']}."
        write_package("plugin", names, "a plugin of polycast")
