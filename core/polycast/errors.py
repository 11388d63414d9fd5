"""Exceptions and warnings. Each derives from the standard class that code written for torch catches."""

import sys
import warnings
from pathlib import Path

__all__ = [
    "AutocastDisabledWarning",
    "BackendBrokenError",
    "BackendConflictError",
    "BackendNotFoundError",
    "InvalidBackendError",
    "RecipeDisabledWarning",
    "SlowDtypeWarning",
    "StaleWeightError",
]


class BackendNotFoundError(RuntimeError):
    """No backend is registered for a device type that torch knows."""


class BackendBrokenError(RuntimeError):
    """A backend's plugin is installed, but cannot be loaded or violates the contract; the cause is chained."""


class BackendConflictError(RuntimeError):
    """Several distributions supply the backend of one device type, and none is chosen."""


class InvalidBackendError(ValueError):
    """An object violates the contract of :class:`polycast.plugin.Backend`."""


class StaleWeightError(RuntimeError):
    """A WeightCache with ``verify=True`` found a weight that was changed without a new version."""


class AutocastDisabledWarning(UserWarning):
    """The device or its backend does not support a region, which runs with autocast disabled."""


class RecipeDisabledWarning(AutocastDisabledWarning):
    """The device does not support a recipe, so the region computes in the fast dtype."""


class SlowDtypeWarning(UserWarning):
    """The device emulates the fast dtype of a region, which makes most ops slower than in float32.

    Issued once for each device and dtype in a process, at the first such region without a recipe.
    """


_SKIPPED_PACKAGES = {"contextlib", "polycast", "polycast_backends", "polycast_plugins", "torch"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the line of user code that called polycast, directly or through torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _SKIPPED_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def torch_is_missing() -> BaseException:
    """Return the exception for an import of polycast without torch; for the command it exits with the same text."""
    text = (
        "polycast needs torch 2.11 or newer, and no torch is installed here. Install it: `pip install torch`, or as "
        "https://pytorch.org/get-started/locally/ says for your device."
    )
    name = Path(sys.argv[0]).stem if sys.argv else ""  # it is "-m" while Python looks for the module to run
    is_command = name == "polycast" or (name == "-m" and "polycast" in sys.orig_argv)
    return SystemExit(f"polycast: {text}") if is_command else ModuleNotFoundError(text, name="torch")
