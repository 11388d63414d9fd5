"""``polycast run``: run a program, unchanged, with polycast in place of torch's autocast."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from polycast import Policy, backends, observe
from polycast.plugin import check, choose_engine, dtype_name, get_backend, read_dtype, read_recipe
from polycast_plugins.cli import check_output, library_errors

from .observing import ObservedOutput
from .program import Program
from .session import Options, start

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    program: Annotated[
        str,
        typer.Argument(metavar="PROGRAM", help="A script; '-' reads it from the standard input. With -m, a module."),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the program.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    weight_cache: Annotated[
        bool, typer.Option("--weight-cache", help="Keep the casts of weights between regions under no_grad.")
    ] = False,
    wrap: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE[:DTYPE]",
            help="Run each outermost call of a module in a region, such as cpu:bfloat16 or auto.",
        ),
    ] = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="Run regions with this policy file.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compute matmuls by this recipe under no_grad, such as int8 or fastest."),
    ] = None,
    show_observed: Annotated[
        bool, typer.Option("--observe", help="Print on stderr, at the end, what ran in which dtype.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML report at the end: what ran in which dtype, and why."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no summary at the end.")] = False,
) -> Callable[[], None]:
    """Run a program with polycast in place of torch.autocast. Options come before the program."""
    with library_errors():
        backends()  # reads the environment variables, and raises if one is invalid
        options = _options(weight_cache, wrap, policy, _output_options(show_observed, report, quiet), recipe)
        if os.environ.get("POLYCAST_ENGINE") == "native":
            choose_engine()  # raises if it cannot be built
    asked = Program(program, tuple(arguments or ()), is_module)
    try:
        start_program = asked.prepare()
    except OSError as error:
        typer.echo(f"polycast: can't open file {asked.path!r}: [Errno {error.errno}] {error.strerror}", err=True)
        raise typer.Exit(2) from error

    def run_program() -> None:
        start(options, summarizes=not quiet)
        start_program()

    return run_program


def _options(
    weight_cache: bool, wrap: str | None, policy: Path | None, observed: ObservedOutput | None, recipe: str | None
) -> Options:
    loaded = None if policy is None else Policy.load(policy)
    if loaded is not None and loaded.has_module_rules:
        raise ValueError(
            f"--policy {policy}: the file has rules for modules, which --policy cannot apply. Call "
            "polycast.apply_policy(model, policy) in the program, or leave [modules] out of the file."
        )
    if recipe is not None:
        try:
            read_recipe(recipe)
        except ValueError as error:
            raise ValueError(f"--recipe: {error}") from None
    return Options(weight_cache, None if wrap is None else _parse_wrap(wrap), loaded, observed, recipe)


def _output_options(table: bool, report: Path | None, quiet: bool) -> ObservedOutput | None:
    if report is not None:
        try:
            check_output(report)
        except ValueError as error:
            raise ValueError(f"--report: {error}") from error
    if not table and report is None:
        return None
    with observe():  # raises if this machine cannot observe, before the program runs
        pass
    return ObservedOutput(table, None if report is None else str(report.absolute()), quiet)


def _parse_wrap(text: str) -> tuple[str, torch.dtype | None]:
    device, colon, name = text.partition(":")
    backend = get_backend(device)
    try:
        dtype = read_dtype(name) if colon else None
    except ValueError as error:
        supported = ", ".join(map(dtype_name, backend.supported_dtypes()))
        raise ValueError(
            f"--wrap {text}: {error}. Expected DEVICE or DEVICE:DTYPE; {device} supports {supported}."
        ) from None
    answer = check(backend)
    if answer.available and dtype is not None:
        answer = check(backend, dtype)
    if not answer.available:
        raise ValueError(f"--wrap {text}: {answer.reason}.")
    return backend.device_type, dtype
