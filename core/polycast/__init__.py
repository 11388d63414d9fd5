"""Autocast for PyTorch as a plugin system: mixed precision on any device.

Start with :class:`autocast`. :func:`observe` shows what ran in which dtype, :func:`profile` what is fast on a device.
"""

import importlib
import logging
from typing import Any

try:
    importlib.import_module("torch")
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is installed, but lacks a dependency
        raise
    from .errors import torch_is_missing

    raise torch_is_missing() from None

from . import errors as errors
from . import plugin as plugin
from .common.lazy_names import lazy_names

# An exported program may call this operator, so torch has to know it from the start.
importlib.import_module(".engine.casts.cached_cast", __name__)

logging.getLogger(__name__).addHandler(logging.NullHandler())
_get_own, _, _own = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    if name != "__all__" and (name in _own or name.startswith("__")):
        return _get_own(name)
    from .policy.manifests import manifests, public_name

    if name == "__all__":
        return sorted({*_own, *(each for known in manifests() for each in known.plugin.names)} - {"__version__"})
    return public_name(name)


def __dir__() -> list[str]:
    here = (name for name in globals() if name.startswith("__") or name in ("errors", "plugin"))
    return sorted({*__getattr__("__all__"), "__version__", *here})
