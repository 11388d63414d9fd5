"""The hooks that plugins implement for a device, the pluggy markers for them, and the entry points that have them."""

import importlib.metadata
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pluggy

from ..common.env import canonical_name
from ..errors import InvalidBackendError
from ..torch_internals.foreign_import import foreign_import
from .backend import Backend, Extension

PROJECT = "polycast"
ENTRY_POINT_GROUP = "polycast.backends"
EXTENSIONS_GROUP = "polycast.extensions"
GENERIC = "generic"
"""The entry point of a backend for the devices that no other entry point names."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def polycast_backend(device_type: str) -> Backend | None:
    """Return the backend; None: a generic plugin has none. Called once for each device type, when it is first used."""


@hookspec
def polycast_extension(device_type: str) -> Extension:  # type: ignore[empty-body]
    """Return what the package adds to a device. Called once for each device type, when it is first used."""


@dataclass(frozen=True)
class Candidate:
    """An entry point that offers a backend or an extension; it is not imported yet."""

    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def built_in(self) -> bool:
        """Whether it comes with polycast."""
        return canonical_name(self.distribution) == PROJECT

    @property
    def device_type(self) -> str:
        """The device type: the name of the entry point, up to a dot."""
        return self.entry_point.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.entry_point.value})"

    def call_hook(self, hook: str, expected: str, device_type: str) -> Any:
        """Import the plugin, and return what its hook returns; None: a generic plugin does not serve the device.

        Raises:
            InvalidBackendError: it does not implement the hook, or does so more than once.
        """
        # A plugin manager of its own, so that a rejected plugin leaves nothing behind. pluggy's own loader of entry
        # points imports all plugins and stops at the first broken one.
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(sys.modules[__name__])
        with nullcontext() if self.built_in else foreign_import(str(self)):
            manager.register(self.entry_point.load(), name=self.distribution)
            manager.check_pending()
            answers: list[Any] = getattr(manager.hook, hook)(device_type=device_type)
        if not answers and self.device_type == GENERIC:
            return None
        if len(answers) != 1:
            raise InvalidBackendError(
                f"{self.entry_point.value} must implement the hook {hook} (marked with @polycast.plugin.hookimpl) and "
                f"return {'an' if expected[0] in 'AEIOU' else 'a'} {expected} from it; got {len(answers)} answers"
            )
        return answers[0]
