"""The versions in reports and saved files."""

import functools
import importlib.metadata
import platform

import torch


def _own_version() -> str:
    try:
        return importlib.metadata.version("polycast")
    except importlib.metadata.PackageNotFoundError:  # a source tree or an archive on the path
        return "unknown"


__version__ = _own_version()


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of polycast, torch and Python."""
    return {"polycast": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def name_and_version(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Return the name and the version of the distribution that has an entry point."""
    distribution = entry_point.dist
    assert distribution is not None  # entry_points() always sets it
    try:
        name, version = distribution.name, distribution.version
    except Exception:  # a half-removed distribution has no metadata; the exception depends on the Python
        name = version = ""
    return name or "(nameless)", version or "(no version)"
