"""``polycast build``: have the native engine ahead of its first use, for instance in a container image."""

import typer

from ..engine.native import prebuilt
from ..engine.native.build import find_or_build
from ..engine.native.cache import BuildError, cache_directory
from .terminal import library_errors


def run() -> None:
    """Build the native engine now, unless it came with polycast or is built already, and print where it is."""
    try:
        with library_errors():
            library = prebuilt.find() or find_or_build(cache_directory(), again=True)
    except BuildError as error:
        typer.echo(f"polycast: the native engine cannot be built: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(library)
