"""``polycast profile``: measure what is fast on a device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polycast import DeviceProfile, backends, profile
from polycast_plugins.cli import check_output, console, library_errors, print_json, print_line

from .measurement import as_lines
from .profile import look_up

_ROWS = 128


def summary(device_type: str) -> str | None:
    """Return a sentence with the ratios of linear layers, by the device's profile; None if it has none."""
    try:
        found = look_up(device_type)
    except Warning as error:  # a filter turned it into an error
        return f"device_details() raised {type(error).__name__}: {error}"
    profile = found.profile
    if profile is None:
        return found.warning
    ways = {each.way for each in profile.measurements if each.op == "linear" and each.rows >= _ROWS} - {"float32"}
    ratios = {way: profile.ratio("linear", _ROWS, way) for way in profile.ways("linear") if way in ways}
    shown = ", ".join(f"{way} {ratio:.2g}" for way, ratio in ratios.items() if ratio is not None)
    noise = f" of {profile.date}, which is noisy: run polycast profile {profile.device_type} --refresh"
    return (
        f"linear of {_ROWS} rows takes {shown or 'an unknown part'} of float32's time, by its profile"
        f"{noise * profile.is_noisy}"
    )


def describe() -> Iterator[str]:
    """Yield the lines of each ready device's profile, or why there is none, for ``polycast doctor``."""
    for device_type in [name for name, status in backends().items() if status.is_usable]:
        found = look_up(device_type)
        if found.profile is None:
            yield f"{device_type}: {found.warning or f'none; polycast profile {device_type} makes one'}"
        else:
            yield from _lines(console(), found.profile, indentation=2)


def _lines(out: Console, profile: DeviceProfile, indentation: int = 0) -> list[str]:
    """Return a profile as lines: a table, unless the terminal is too narrow for it."""
    lines = repr(profile).splitlines()
    too_wide = out.is_terminal and max(map(len, lines)) + indentation > out.width
    return as_lines(lines[0], profile.measurements, profile.omissions) if too_wide else lines


def run(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="The device, such as cpu.")] = "cpu",
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh", help="Measure again; the result replaces the profile, unless it is noisy and no better."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the profile to a file, for POLYCAST_PROFILE.")
    ] = None,
) -> None:
    """Show what is fast on a device, measuring it unless that has been done."""
    with library_errors():
        if output is not None:
            check_output(output, "profile.json")
        found = profile(device, refresh=refresh)
        if output is not None:
            found.save(output)
    if as_json:
        print_json(found.to_dict())
    elif output is None:
        out = console()
        for line in _lines(out, found):
            print_line(out, line)
    else:
        console().print(f"written: {output}", soft_wrap=True)
