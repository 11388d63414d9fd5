"""The ``polycast`` command. It has the commands that plugins list in their manifests; those about devices are here."""

from polycast.plugin import Plugin, lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

_HERE = "polycast_plugins.cli"

plugin = Plugin(
    commands={
        "devices": f"{_HERE}.devices:show",
        "ops": f"{_HERE}.ops:show",
        "build": f"{_HERE}.build:run",
        "doctor": f"{_HERE}.doctor:run",
        "new-backend": f"{_HERE}.new_backend:run",
        "new-plugin": f"{_HERE}.new_plugin:run",
    }
)
