"""The versions in reports and saved files."""

import difflib
import functools
import importlib.metadata
import platform
from collections.abc import Collection, Iterable

import torch

API_VERSION = 1
"""The version of the contract between polycast and plugins, `polycast.plugin`."""

try:
    __version__ = importlib.metadata.version("polycast")
except importlib.metadata.PackageNotFoundError:  # a source tree or an archive on the path
    __version__ = "unknown"


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


def api_problem(api: object) -> str:
    """Return why a plugin for a version of the contract cannot be used, and what to do; an empty text if it can."""
    if type(api) is int and api == API_VERSION:
        return ""
    do = "upgrade polycast" if isinstance(api, int) and api > API_VERSION else "upgrade the plugin"
    return f"its api is {api!r}, and polycast {__version__} supports version {API_VERSION} of polycast.plugin: {do}"


def misspelled(names: Iterable[str], contract: Collection[str]) -> list[str]:
    """Return a problem for each public name that a contract does not know and that is near one that it knows."""
    unknown = sorted(name for name in set(names) - set(contract) if not name.startswith("_"))
    near = {name: difflib.get_close_matches(name, contract, n=1, cutoff=0.85) for name in unknown}
    pairs = [(name, found[0]) for name, found in near.items() if found]
    # One that is made of a known name and more, as all_supported_dtypes, is an author's own.
    typos = [(name, known) for name, known in pairs if known not in name or len(name) < len(known) + 2]
    return [f"{name} is unknown: did you mean {known!r}?" for name, known in typos]
