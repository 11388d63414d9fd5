"""``polycast profile``: measure what is fast on a device."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from polycast import DeviceProfile, backends
from polycast_plugins.cli import console, library_errors, print_json, print_line

from .measurement import as_lines
from .profile import look_up, noise_of, obtain
from .profile_file import announce
from .verdict import verdict


def summary(device_type: str) -> str | None:
    """Return the verdict on a device in a sentence; None if it has no profile."""
    try:
        found = look_up(device_type)
    except Warning as error:  # a filter turned it into an error
        return f"device_details() raised {type(error).__name__}: {error}"
    if found.profile is None:
        return found.warning
    return _verdict(found.profile)[0]


def describe() -> Iterator[str]:
    """Yield the verdict on each ready device, or why it has no profile, for ``polycast doctor``."""
    for device_type in [name for name, status in backends().items() if status.is_usable]:
        found = look_up(device_type)
        if found.profile is None:
            yield f"{device_type}: {found.warning or f'none; polycast profile {device_type} makes one'}"
        else:
            yield from (found.profile.heading(), *_verdict(found.profile))


def _verdict(profile: DeviceProfile) -> list[str]:
    return [noise_of(profile, profile)] if profile.is_noisy else verdict(profile)


def _table(out: Console, profile: DeviceProfile) -> list[str]:
    """Return the table as lines, in words if the terminal is too narrow for it."""
    lines = repr(profile).splitlines()
    too_wide = out.is_terminal and max(map(len, lines)) > out.width
    return as_lines(lines[0], profile.measurements, profile.omissions) if too_wide else lines


def run(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="The device, such as cpu.")] = "cpu",
    table: Annotated[bool, typer.Option("--table", help="Show all times, relative to float32.")] = False,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh", help="Measure again; the result replaces the profile, unless it is noisy and no better."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON, for POLYCAST_PROFILE.")] = False,
) -> None:
    """Say what is fast on a device, measuring it unless that has been done."""
    with library_errors():
        found, complaint = obtain(device, refresh)
    out = console()
    if complaint and (as_json or table or not found.is_noisy):
        announce(complaint)
    if as_json:
        print_json(found.to_dict())
    elif table:
        for line in _table(out, found):
            print_line(out, line)
    elif found.is_noisy:
        print_line(out, complaint or noise_of(found, found))
    else:
        for line in (found.heading(), *verdict(found), f"All times: polycast profile {found.device_type} --table"):
            print_line(out, line)
