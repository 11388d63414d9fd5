"""Find the plugins that offer backends, from the metadata of installed distributions. None is imported."""

import importlib.metadata
from collections.abc import Iterable

from ..common import env
from ..common.versions import name_and_version
from ..errors import warn_user
from ..policy.names import hint
from .backend_loader import BackendLoader, Candidate
from .hookspecs import ENTRY_POINT_GROUP


def discover() -> dict[str, BackendLoader]:
    """Return a loader for each device type that an installed distribution offers a backend for."""
    third_party, blocked, providers = env.discovery(), env.blocked(), env.providers()
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    offered = {entry_point.name for entry_point in entry_points}
    _warn_of_unknown("POLYCAST_BLOCK", blocked, offered)
    _warn_of_unknown("POLYCAST_PROVIDER", providers, offered)
    candidates = [Candidate(*name_and_version(entry_point), entry_point) for entry_point in entry_points]
    loaders: dict[str, BackendLoader] = {}
    for candidate in sorted(candidates, key=str):  # the order of distributions in a folder is arbitrary
        if candidate.built_in or third_party:
            name = candidate.entry_point.name
            loader = loaders.setdefault(name, BackendLoader(name, name in blocked, providers.get(name)))
            loader.candidates.append(candidate)
    return loaders


def _warn_of_unknown(variable: str, named: Iterable[str], offered: Iterable[str]) -> None:
    """Warn of device types that a variable names in vain: no backend is offered for them."""
    for device_type in sorted(set(named) - set(offered)):
        warn_user(
            f"{variable} names {device_type!r}, which no installed distribution offers a backend for: "
            + hint(device_type, sorted(offered))
        )
