"""``polycast profile``: measure what is fast on a device."""

from pathlib import Path
from typing import Annotated

import typer

from ..observer.report.target import check_target
from ..profiling.profile import look_up, profile
from .terminal import console, library_errors


def run(
    device: Annotated[str, typer.Argument(help="The device, such as cpu.")] = "cpu",
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, and replace the kept profile.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the profile to a file, for POLYCAST_PROFILE.")
    ] = None,
) -> None:
    """Show what is fast on a device, measuring it unless that has been done."""
    with library_errors():
        if output is not None:
            check_target(output, "profile.json")
        refusal = look_up(device).refusal
        if refusal is not None:
            typer.echo(f"polycast: the kept profile is ignored: {refusal}", err=True)
        found = profile(device, refresh=refresh)
        if output is not None:
            found.save(output)
    if as_json:
        typer.echo(found.to_json(), nl=False)
    elif output is None:
        console().print(repr(found), soft_wrap=True)
    else:
        console().print(f"written: {output}", soft_wrap=True)
