"""``polycast build``: have the native engine and its observer ahead of their first use, for instance in a container image."""

import typer

from ..engine.native import prebuilt
from ..engine.native.build import find_or_build
from ..engine.native.cache import BuildError, cache_directory
from ..engine.native.compiling import ENGINE, OBSERVER
from .terminal import library_errors


def run() -> None:
    """Build the native engine now, unless it came with polycast or is built already, and print where it is."""
    for wanted in (ENGINE, OBSERVER):
        try:
            with library_errors():
                library = prebuilt.find(wanted) or find_or_build(cache_directory(), again=True, wanted=wanted)
        except BuildError as error:
            typer.echo(f"polycast: {wanted.what} cannot be built: {error}", err=True)
            raise typer.Exit(1) from error
        typer.echo(library)
