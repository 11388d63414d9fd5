"""The command line: its commands are those of the manifests, each imported when it is run, and all for ``--help``."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from polycast import __version__
from polycast.plugin import manifests

from .terminal import library_errors, plain_warnings, stdout_for_json


class _Then(BaseException):
    """Carries a function out of typer, which handles exceptions, exit codes and hooks in its own way."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function


class _FlagsWithoutTypes:
    """A command that shows no type after a flag, where typer shows ``<bool>`` or ``BOOLEAN``."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_FlagsWithoutTypes, TyperCommand):
    """A command."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        if settings.get("help"):
            settings["help"] = re.sub(r"(?<!\n)\n(?!\n)", " ", settings["help"])
        super().__init__(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        with stdout_for_json() if ctx.params.get("as_json") else nullcontext():
            result = super().invoke(ctx)
        if callable(result):
            raise _Then(result)
        return result


class _Commands(Mapping[str, Any]):
    """The commands of all plugins by name, each imported when it is read."""

    def __iter__(self) -> Iterator[str]:
        with library_errors():
            return iter(dict.fromkeys(name for each in manifests() for name in each.plugin.commands))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # list() would ask for the length

    def __getitem__(self, name: str) -> Any:
        with library_errors():
            try:
                found = manifests().find("commands", name)
            except RuntimeError as error:  # the other commands work
                found = _unusable(str(error))
        if found is None:
            raise KeyError(name)
        return _command_of(name, found)


class _Group(_FlagsWithoutTypes, TyperGroup):
    """The command ``polycast``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast("MutableMapping[str, Any]", _Commands())

    def main(self, *args: Any, **settings: Any) -> Any:
        with plain_warnings():
            return super().main(*args, **settings)


def _command_of(name: str, found: Callable[..., object] | typer.Typer) -> Any:
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command()(function)
    for each in found.registered_commands:
        each.cls = _Command
    command = get_command(found)
    command.name = name
    return command


def _unusable(problem: str) -> typer.Typer:
    """Return a command that says why there is none."""
    command = typer.Typer(add_completion=False)

    @command.command(help=problem, context_settings={"ignore_unknown_options": True})
    def fail(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        typer.echo(f"polycast: {problem}", err=True)
        raise typer.Exit(2)

    return command


app = typer.Typer(
    add_completion=False,
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Autocast for PyTorch as a plugin system. `polycast COMMAND --help` describes a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polycast {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    hook = sys.excepthook
    try:
        app(prog_name="polycast")
    except _Then as then:
        function = then.function
    sys.excepthook = hook  # typer sets its own
    function()
