"""What computes, for the records of a run: versions, packages, the engine, processors and the command."""

import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from polycast import __version__, backends
from polycast.plugin import choose_engine, disable_autocast, get_backend

_LONGEST_COMMAND = 300


def versions() -> dict[str, str]:
    """Return the versions of polycast, torch and Python."""
    return {"polycast": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def packages_in_use() -> dict[str, list[str]]:
    """Return the packages of each device that computed in regions; none if a variable of polycast is invalid."""
    try:
        return backends().in_use()
    except ValueError:
        return {}


def computed_by() -> dict[str, Any]:
    """Return the engine (empty if no region was entered), the versions and the machine, as JSON has it."""
    packages = packages_in_use()
    engine = choose_engine().name if packages else ""  # kernels are installed, so it is chosen
    return {
        "engine": engine,
        "versions": versions(),
        "packages": packages,
        "processors": processors(packages),
        "num_threads": torch.get_num_threads(),
        "command": command(),
    }


def processors(devices: Iterable[str]) -> dict[str, str]:
    """Return the names of devices, without those whose backend raises an error."""
    found = {}
    for device in devices:
        try:
            with disable_autocast():
                found[device] = str(get_backend(device).device_details()["name"])
        except (Exception, SystemExit):  # some libraries exit if they find no device
            continue
    return found


def command() -> str:
    """Return the command line of this process, on one line."""
    program, *arguments = sys.orig_argv or [""]
    text = " ".join(shlex.join([Path(program).name, *arguments]).split())
    return text if len(text) <= _LONGEST_COMMAND else f"{text[: _LONGEST_COMMAND - 3]}..."
