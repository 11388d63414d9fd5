"""The ``polycast`` command. Nothing else imports this package, so that ``import polycast`` does not load typer."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from polycast import __version__

from . import build, devices, doctor, explain, new_backend, ops, profile, run, tune
from .terminal import plain_warnings, stdout_for_json


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
        with plain_warnings(), stdout_for_json() if ctx.params.get("as_json") else nullcontext():
            return super().invoke(ctx)


class _Commands(_FlagsWithoutTypes, TyperGroup):
    """All commands."""


app = typer.Typer(
    add_completion=False,
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Autocast for PyTorch as a plugin system. `polycast COMMAND --help` describes a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "devices": devices.show,
    "ops": ops.show,
    "build": build.run,
    "doctor": doctor.run,
    "profile": profile.run,
    "explain": explain.run,
    "tune": tune.run,
    "new-backend": new_backend.run,
}
for _name, _function in _COMMANDS.items():
    app.command(_name, cls=_Command)(_function)
app.command("run", cls=_Command, context_settings={"allow_interspersed_args": False})(run.run)


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
    except run.Ready as ready:
        start = ready.start
    sys.excepthook = hook  # typer sets its own
    start()
