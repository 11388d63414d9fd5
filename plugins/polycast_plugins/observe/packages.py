"""The versions, the packages and the engine that compute, for the records of a run."""

import platform
from typing import Any

import torch

from polycast import __version__, backends
from polycast.plugin import choose_engine


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
    """Return the engine (empty if no region was entered), the versions, and the packages by device, as JSON has it."""
    packages = packages_in_use()
    engine = choose_engine().name if packages else ""  # kernels are installed, so it is chosen
    return {"engine": engine, "versions": versions(), "packages": packages}
