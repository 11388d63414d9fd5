"""Find the plugins that offer backends and extensions, from the metadata of installed distributions; import none."""

import importlib.metadata
from collections.abc import Iterable

from ..common import env
from ..common.versions import name_and_version
from ..errors import warn_user
from ..policy.names import hint
from .backend_loader import BackendLoader
from .candidate import Candidate
from .extensions import DeviceExtensions
from .hookspecs import ENTRY_POINT_GROUP, EXTENSIONS_GROUP


def discover() -> dict[str, BackendLoader]:
    """Return a loader for each device type that an installed distribution offers a backend for.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value, also one that matters to others.
    """
    env.engine()
    third_party, blocked, providers = env.discovery(), env.blocked(), env.providers()
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    offered = {entry_point.name for entry_point in entry_points}
    _warn_of_unknown("POLYCAST_BLOCK", blocked, offered)
    _warn_of_unknown("POLYCAST_PROVIDER", providers, offered)
    loaders: dict[str, BackendLoader] = {}
    for candidate in _candidates(entry_points, third_party):
        name = candidate.device_type
        loader = loaders.setdefault(name, BackendLoader(name, name in blocked, providers.get(name)))
        loader.candidates.append(candidate)
    return loaders


def discover_extensions() -> dict[str, DeviceExtensions]:
    """Return what installed distributions add to each device type, those of third parties first."""
    candidates = _candidates(importlib.metadata.entry_points(group=EXTENSIONS_GROUP), env.discovery())
    extensions: dict[str, DeviceExtensions] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.built_in):
        name = candidate.device_type
        extensions.setdefault(name, DeviceExtensions(name)).candidates.append(candidate)
    return extensions


def _candidates(entry_points: Iterable[importlib.metadata.EntryPoint], third_party: bool) -> list[Candidate]:
    """Return the candidates that entry points offer, by name: the order of distributions in a folder is arbitrary."""
    candidates = [Candidate(*name_and_version(entry_point), entry_point) for entry_point in entry_points]
    return sorted((each for each in candidates if each.built_in or third_party), key=str)


def _warn_of_unknown(variable: str, named: Iterable[str], offered: Iterable[str]) -> None:
    """Warn of device types that a variable names in vain: no backend is offered for them."""
    for device_type in sorted(set(named) - set(offered)):
        warn_user(
            f"{variable} names {device_type!r}, which no installed distribution offers a backend for: "
            + hint(device_type, sorted(offered))
        )
