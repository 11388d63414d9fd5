"""What polycast raises and warns with; each class is also the standard one that code written for torch catches."""

import sys
import warnings
from pathlib import Path


class BackendNotFoundError(RuntimeError):
    """No backend is registered for a device type that torch knows."""


class BackendBrokenError(RuntimeError):
    """A backend's plugin is installed, but cannot be loaded or breaks the contract; the cause is chained."""


class BackendConflictError(RuntimeError):
    """Several distributions supply the backend of one device type, and nothing says which to take."""


class InvalidBackendError(ValueError):
    """An object offered as a backend does not keep the contract of :class:`polycast.Backend`."""


class StaleWeightError(RuntimeError):
    """A WeightCache with ``verify=True`` found that a weight was changed behind its back."""


class AutocastDisabledWarning(UserWarning):
    """A region was asked for that the device or its backend cannot give; it runs with autocast disabled."""


class RecipeDisabledWarning(AutocastDisabledWarning):
    """A recipe was asked for that the device cannot compute by; the region runs in the fast dtype."""


_NOT_THE_USERS = {"contextlib", "polycast", "torch"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of what the user's code led to, in the name of the line of it that called into polycast.

    That may be on the way over torch, whose autocast polycast stands in for, or an ExitStack.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def torch_is_missing() -> BaseException:
    """Return what importing polycast without torch raises: for the command, an exit that says the same."""
    text = (
        "polycast needs torch 2.11 or newer, and no torch is installed here. Install it: `pip install torch`, or as "
        "https://pytorch.org/get-started/locally/ says for your device."
    )
    name = Path(sys.argv[0]).stem if sys.argv else ""  # while Python looks for a module to run it is "-m"
    is_command = name == "polycast" or (name == "-m" and "polycast" in sys.orig_argv)
    return SystemExit(f"polycast: {text}") if is_command else ModuleNotFoundError(text, name="torch")
