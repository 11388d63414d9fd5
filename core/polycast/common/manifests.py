"""Manifests of plugins: what each adds to polycast, known before its code is imported.

A manifest is a `Plugin` that an entry point in the group `GROUP` names. Reading it imports its
module, which should import nothing else of the plugin.
"""

import functools
import importlib.metadata
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import warn_user
from . import env

GROUP = "polycast.plugins"
PROJECT = "polycast"


@dataclass(frozen=True)
class Plugin:
    """What a plugin adds to polycast. Objects are named ``module:attribute``, and imported when they are first used.

    Attributes:
        recipes: the classes of recipes, by kind.
        vetoes: functions that say why a kernel of a recipe should not compute a call: given the device type, the
            recipe's kind, the op and its arguments, which may be fake, each returns a str, or None.
    """

    recipes: Mapping[str, str] = field(default_factory=dict)
    vetoes: tuple[str, ...] = ()


@functools.cache
def manifests() -> Mapping[str, Plugin]:
    """Return the manifests of the installed plugins, by name and distribution, and warn of broken ones."""
    return dict(_read())


def _read() -> Iterator[tuple[str, Plugin]]:
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        distribution = "" if point.dist is None else point.dist.name
        if env.canonical_name(distribution) != PROJECT and not env.discovery():
            continue
        try:
            plugin = point.load()
            if not isinstance(plugin, Plugin):
                raise TypeError(f"{point.value} must be a polycast.plugin.Plugin, got {plugin!r}")
        except (Exception, SystemExit) as error:
            warn_user(
                f"The plugin {point.name!r} of {distribution} is broken: {type(error).__name__}: {error}. Repair or "
                f"uninstall {distribution}."
            )
        else:
            yield f"{point.name} ({distribution})", plugin


def find(table: str, name: str) -> Any:
    """Return the object with a name in a table of a plugin's manifest, such as ``recipes``; None if there is none.

    Raises:
        RuntimeError: several plugins have one.
    """
    tables = {plugin: getattr(manifest, table) for plugin, manifest in manifests().items()}
    offers = {plugin: each[name] for plugin, each in tables.items() if name in each}
    if len(offers) > 1:
        raise RuntimeError(f"Several plugins have {name!r} in {table}: {', '.join(offers)}. Uninstall all but one.")
    return next((pkgutil.resolve_name(path) for path in offers.values()), None)


def names(table: str) -> list[str]:
    """Return the names, or the paths, that plugins have in a table of their manifests."""
    return [name for manifest in manifests().values() for name in getattr(manifest, table)]
