"""Output and error handling of the commands."""

import io
import json
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from ..common import env
from ..engine.choice import build_failure, choose_engine
from ..errors import SlowDtypeWarning


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text without interpreting markup in it."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # its encoding may lack characters of the text
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def table(*columns: str, numbers: tuple[str, ...] = (), title: str | None = None) -> Table:
    """Return an empty table for :func:`print_table`; the columns in `numbers` are aligned right."""
    new = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        justify: JustifyMethod = "right" if column in numbers else "left"
        new.add_column(column, justify=justify, overflow="fold")
    return new


def print_table(out: Console, rows: Table) -> None:
    """Print a table. Neither a header nor a word is broken, unless the terminal is too narrow for the longest words."""
    widths = [
        max([len(str(column.header)), *(len(word) for cell in column.cells for word in str(cell).split())])
        for column in rows.columns
    ]
    if sum(widths) + 2 * (len(widths) - 1) <= out.width:
        for column, width in zip(rows.columns, widths, strict=True):
            column.min_width = width
    out.print(rows)


def print_line(out: Console, line: str) -> None:
    """Print a line of text: whole or, in a terminal, wrapped between words, with twice its indentation."""
    lines = [line]
    if out.is_terminal:
        indentation = line[: len(line) - len(line.lstrip())]
        lines = textwrap.wrap(line, out.width, subsequent_indent=2 * indentation, break_on_hyphens=False) or [""]
    for each in lines:
        out.print(each, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def engine_lines() -> list[str]:
    """Return what there is to say about the engine: where it comes from or, if it is not the native one, why not.

    Raises as :func:`polycast.engine.choice.choose_engine` does.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "polycast runs on its reference engine")  # said by the lines
        engine = choose_engine()
    if engine.name == "native":
        return [f"Engine: native, {engine.origin}"]
    failure = build_failure()
    if not failure:
        why = "because POLYCAST_ENGINE=reference. Unset it for the native engine."
        return [f"Engine: reference, {why}", f"{_COST}."]
    version = str(torch.__version__).partition("+")[0]
    return [
        f"Engine: reference, because the native engine cannot be built: {failure}",
        f"{_COST}; without a compiler, neither do kernels in C++, such as those of int8. A wheel of polycast that has "
        f"an engine for torch {version} needs no compiler.",
    ]


_COST = "Without the native engine, regions are slower and polycast.observe does not work"


@contextmanager
def ignore_slow_dtypes() -> Iterator[None]:
    """Ignore :class:`SlowDtypeWarning`, in a command that reports slow dtypes in another way."""
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
