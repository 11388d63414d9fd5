"""The hooks that plugins implement for a device, the pluggy markers for them, and the entry points that have them."""

import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Any

import pluggy

from ..common.env import canonical_name
from ..errors import InvalidBackendError
from .backend import Backend, Extension

PROJECT = "polycast"
ENTRY_POINT_GROUP = "polycast.backends"
EXTENSIONS_GROUP = "polycast.extensions"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def polycast_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend. Called once per process, when the device is first used or observed."""


@hookspec
def polycast_extension() -> Extension:  # type: ignore[empty-body]
    """Return what the package adds to a device. Called once per process, when the device is first used or observed."""


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

    def call_hook(self, hook: str, expected: str) -> Any:
        """Import the plugin, and return what its hook returns.

        Raises:
            InvalidBackendError: it does not implement the hook, or does so more than once.
        """
        # A plugin manager of its own, so that a rejected plugin leaves nothing behind. pluggy's own loader of entry
        # points imports all plugins and stops at the first broken one.
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(sys.modules[__name__])
        manager.register(self.entry_point.load(), name=self.distribution)
        manager.check_pending()
        answers: list[Any] = getattr(manager.hook, hook)()
        if len(answers) != 1:
            raise InvalidBackendError(
                f"{self.entry_point.value} must implement the hook {hook} (marked with @polycast.plugin.hookimpl) and "
                f"return {'an' if expected[0] in 'AEIOU' else 'a'} {expected} from it; got {len(answers)} answers"
            )
        return answers[0]
