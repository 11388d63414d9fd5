"""The fields that the records of a run have about versions, packages, the engine, processors and the command."""

import contextlib
import platform
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from polycast import __version__, backends
from polycast.plugin import choose_engine, disable_autocast, get_backend


def computed_by() -> dict[str, Any]:
    """Return the engine (empty if no region was entered) and the rest of :func:`machine`, as JSON has it."""
    found = machine()
    return {"engine": choose_engine().name if found["packages"] else "", **found}  # kernels are installed: it is chosen


def machine() -> dict[str, Any]:
    """Return the fields of a ``Run`` about the versions, the devices that computed in regions, and the process."""
    try:
        packages = backends().in_use()
    except ValueError:  # a variable of polycast is invalid
        packages = {}
    secret = r"(?i)((?:token|secret|password|passwd|api[-_]?key)(?:=|\0(?!-)))[^\0]*"  # not --max-tokens
    program, *arguments = re.sub(secret, r"\1...", "\0".join(sys.orig_argv)).split("\0")
    command = " ".join(shlex.join([Path(program).name, *arguments]).split())
    return {
        "versions": {"polycast": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "packages": packages,
        "processors": _names_of(packages),
        "num_threads": torch.get_num_threads(),
        "command": textwrap.shorten(command, 300, placeholder=" ..."),
    }


def _names_of(devices: Iterable[str]) -> dict[str, str]:
    """Return the names of devices, without those whose backend raises an error."""
    found = {}
    for device in devices:
        with contextlib.suppress(Exception, SystemExit), disable_autocast():  # some libraries exit without a device
            found[device] = str(get_backend(device).device_details()["name"])
    return found
