"""Exceptions and warnings. Each derives from the standard class that code written for torch catches.

And functions for exceptions of other code: `raise_if_callers` tells those that the caller caused from its own.
"""

import functools
import importlib
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

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


def library(name: str) -> Any:
    """Import a library that an extra of polycast brings.

    Raises:
        ModuleNotFoundError: it is not installed; the text names the extra, and the line that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_library(error) or str(error), name=error.name) from error


def missing_library(error: ImportError, distribution: str = "polycast") -> str:
    """Return which extra of a distribution has the library that an import lacks, as a sentence; "" if none has it."""
    import importlib.metadata as installed

    with suppress(installed.PackageNotFoundError):
        for line in (error.name and installed.requires(distribution)) or ():
            found = re.match(r"([\w.-]+)([^;]*);.*\bextra *== *['\"]([\w.-]+)", line)
            if found and re.sub("[-_.]+", "_", found[1]).lower() == str(error.name).lower():
                what = f"{distribution}[{found[3]}]"
                install = _place(installed.distribution(distribution), found[3]) or f'"{found[1]}{found[2].strip()}"'
                return f"This needs {found[1]}, which comes with {what}. Install it: pip install {install}"
    return ""


def _place(distribution: Any, extra: str) -> str:
    """Return what pip has to install for an extra: where the distribution came from; "" if that no longer exists."""
    import json
    import urllib.request

    origin = json.loads(distribution.read_text("direct_url.json") or "{}")  # absent if it came from an index
    url, repository = origin.get("url", ""), origin.get("vcs_info", {}).get("vcs")
    if url.startswith("file:") and not repository:
        path = Path(urllib.request.url2pathname(url.removeprefix("file://")))
        editable = "-e " * origin.get("dir_info", {}).get("editable", False)
        return f'{editable}"{path}[{extra}]"' if path.exists() else ""
    at = f" @ {repository}+{url}" if repository else url and f" @ {url}"
    return f'"{distribution.name}[{extra}]{at}"'


PLUGIN_ERRORS = (Exception, SystemExit)  # some libraries exit if they find no device
CALLERS_ERRORS = (MemoryError, RecursionError, Warning)
"""Errors of any code: it is out of memory or stack, or a filter turned a warning into an error."""


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler that is installed now raised an exception, or one that it was raised from."""
    handlers = {_code(handler) for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)}
    chain, frames = [error], set[FrameType]()
    for each in chain:
        called = [frame for frame, _ in traceback.walk_tb(each.__traceback__)]
        if isinstance(each, KeyboardInterrupt) or any(frame.f_code in handlers for frame in called):
            return True
        frames.update(called)
        context = each.__context__
        # The context also has the error that our caller was handling when it called, which these frames did not catch.
        caught = context is not None and context.__traceback__ is not None and context.__traceback__.tb_frame in frames
        chain += [
            before
            for before in (each.__cause__, context if caught else None)
            if before is not None and not any(before is known for known in chain)
        ]
    return False


def _code(handler: Callable[..., object]) -> CodeType | None:
    """Return the code of a function, a method, a partial of one, or ``__call__``; None if it is not in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code: CodeType | None = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code


def is_callers(error: BaseException) -> bool:
    """Return whether the caller caused an exception, which then says nothing about the code that was called."""
    return isinstance(error, CALLERS_ERRORS) or is_interrupt(error)


def raise_if_callers(error: BaseException) -> None:
    """Raise an exception again if the caller caused it."""
    if is_callers(error):
        raise error


def raise_if_callers_at_import(error: BaseException) -> None:
    """Do the same for an import; a warning that a filter turns into an error is of the code that is imported."""
    if is_callers(error) and not isinstance(error, Warning):
        raise error
