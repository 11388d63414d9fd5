"""Output and error handling of the commands."""

import io
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..common import env
from ..engine.choice import choose
from ..errors import SlowDtypeWarning


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text without interpreting markup in it."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # its encoding may lack characters of the text
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def table(*columns: str, numbers: tuple[str, ...] = (), title: str | None = None) -> Table:
    """Return an empty table; the columns in `numbers` are aligned right."""
    new = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_edge=False)
    for column in columns:
        new.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return new


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def engine_name() -> str:
    """Return the name of the engine, building the native one if needed.

    Raises:
        ValueError: POLYCAST_ENGINE has a value that is not legal.
        RuntimeError: POLYCAST_ENGINE is ``native``, and that engine cannot be built.
    """
    return choose().name


def engine_and_origin() -> str:
    """Return the engine's name and where it comes from; raises as :func:`engine_name` does."""
    engine = choose()
    return f"{engine.name}, {engine.origin}" if engine.origin else engine.name


@contextmanager
def ignore_slow_dtypes() -> Iterator[None]:
    """Ignore :class:`SlowDtypeWarning`, in a command that tells its user in another way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowDtypeWarning)
        yield


@contextmanager
def library_errors() -> Iterator[None]:
    """Print errors of the library on stderr, and exit with status 2.

    Every command checks the environment variables, even those that it does not use.
    """
    try:
        env.engine()
        yield
    except (OSError, ValueError, RuntimeError) as error:
        typer.echo(f"polycast: {error}", err=True)
        raise typer.Exit(2) from error
