"""Output and error handling of the commands."""

import io
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch
import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from polycast.plugin import Result, choose_engine


def console() -> Console:
    """Return a console that prints text without interpreting markup in it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may lack characters of the text
    return Console(markup=False, highlight=False, emoji=False)


def table(*columns: str) -> Table:
    """Return an empty table for :func:`print_table`."""
    new = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        new.add_column(column, overflow="fold")
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


def print_result(out: Console, result: Result) -> None:
    """Print the tables and lines of a result."""
    for columns, rows in result.tables():
        shown = table(*columns)
        for row in rows:
            shown.add_row(*row)
        print_table(out, shown)
        out.print()
    for line in result.lines():
        print_line(out, line)


def print_rows(out: Console, widths: Mapping[str, int | None], rows: Iterable[tuple[RenderableType, ...]]) -> None:
    """Print a table with these widths of columns, each row as soon as it is known; None: what is left."""
    for row in chain([None], rows):
        line = table(*widths)
        for column, width in zip(line.columns, widths.values(), strict=True):
            column.width = width
        if row is not None:
            line.show_header = False
            line.add_row(*row)
        out.print(line)


def print_line(out: Console, line: str) -> None:
    """Print a line of text: whole or, in a terminal, wrapped between words, with twice its indentation."""
    lines, rest = [line], 2 * line[: len(line) - len(line.lstrip())]
    if out.is_terminal:
        wrapper = textwrap.TextWrapper(out.width, "", rest, break_long_words=False, break_on_hyphens=False)
        lines = wrapper.wrap(line) or [""]
    for each in lines:
        out.print(each, soft_wrap=True)


_for_json: TextIO | None = None
"""The stdout of a command that prints JSON."""


@contextmanager
def stdout_for_json() -> Iterator[None]:
    """Reserve stdout for :func:`print_json`: what plugins and libraries print goes to stderr until the process ends.

    The file descriptor is not restored, because C libraries print their buffers at the end of the process.
    """
    global _for_json
    sys.stdout.flush()
    _for_json = sys.stdout
    with ExitStack() as stack:
        with suppress(OSError):  # it is no file
            number = sys.stdout.fileno()
            _for_json = stack.enter_context(os.fdopen(os.dup(number), "w", encoding="utf-8"))
            os.dup2(2, number)
        stack.enter_context(redirect_stdout(sys.stderr))
        try:
            yield
        finally:
            _for_json = None


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2), file=_for_json)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings of a command without the line of typer that called it."""
    show = warnings.showwarning

    def show_plainly(message: Any, category: Any, filename: str, *where: Any) -> None:
        if Path(filename).parent.name in ("typer", "click"):
            typer.echo(f"polycast: {message}", err=True)
        else:
            show(message, category, filename, *where)

    with warnings.catch_warnings():
        setattr(warnings, "showwarning", show_plainly)
        yield


_BLAME = """
import sys
last = b""
for line in sys.stdin.buffer:
    if not line.strip():
        break
    last = line
else:
    last and sys.exit("polycast: the process ended in " + last.decode().strip())
"""


@contextmanager
def blame_at_end() -> Iterator[Callable[[str], None]]:
    """Yield a function that says where this process is; if it ends there, also by Ctrl-C, another one prints it."""
    try:
        command = [sys.executable, "-I", "-S", "-c", _BLAME]
        nowhere = subprocess.DEVNULL
        reader = subprocess.Popen(command, 0, stdin=subprocess.PIPE, stdout=nowhere, start_new_session=True)
    except OSError:  # no process can be started
        yield lambda text: None
        return

    def where(text: str) -> None:
        assert reader.stdin is not None
        with suppress(OSError):  # the reader was killed
            reader.stdin.write(" ".join(text.split()).encode() + b"\n")

    with reader:
        try:
            yield where
        finally:
            if sys.exc_info()[0] is not KeyboardInterrupt:
                where("")


def engine_lines() -> list[str]:
    """Return what there is to say about the engine: where it comes from or, if it is not the native one, why not.

    Raises as :func:`polycast.plugin.choose_engine` does.
    """
    engine = choose_engine()
    if engine.name == "native":
        return [f"Engine: native, {engine.origin}"]
    failure = engine.build_failure
    if not failure:
        return ["Engine: reference, because POLYCAST_ENGINE=reference. Unset it for the native engine.", f"{_COST}."]
    version = str(torch.__version__).partition("+")[0]
    return [
        f"Engine: reference, because the native engine cannot be built: {failure}",
        f"{_COST}; without a compiler, neither do kernels in C++, such as those of int8. A wheel of polycast that has "
        f"an engine for torch {version} needs no compiler.",
    ]


_COST = "Without the native engine, regions are slower, weights are not cached and polycast.observe does not work"


@contextmanager
def library_errors() -> Iterator[None]:
    """Print errors of the library on stderr, and exit with status 2."""
    try:
        yield
    except BrokenPipeError:
        raise  # typer exits without a word
    except (OSError, ValueError, RuntimeError) as error:
        typer.echo(f"polycast: {error}", err=True)
        raise typer.Exit(2) from error


def check_output(path: str | os.PathLike[str], such_as: str = "report.html") -> None:
    """Raise now if a file could not be written later. Creates no file.

    Raises:
        ValueError: the folder does not exist or is not writable, or the path is not a writable file.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file in it, such as {target / such_as}.")
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{target} cannot be written: {folder} {what}. Create it, or choose another.")
    try:
        # A folder's mode does not show whether it is writable, so try.
        if target.exists():
            with target.open("ab"):
                pass
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{target} cannot be written: {reason}. Choose a writable file.") from error
