"""The versions in reports and saved files."""

import functools
import importlib.metadata
import platform

import torch


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of polycast, torch and Python."""
    try:
        polycast = importlib.metadata.version("polycast")
    except importlib.metadata.PackageNotFoundError:  # a source tree or an archive on the path
        polycast = "unknown"
    return {"polycast": polycast, "torch": str(torch.__version__), "python": platform.python_version()}
