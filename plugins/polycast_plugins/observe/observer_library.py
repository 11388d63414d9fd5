"""Load the observer: a C++ library that counts what the native engine and torch run.

It is separate from the engine, so that programs which observe nothing need not build it.
"""

import contextlib
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import polycast
from polycast.plugin import Backend, NativeLibrary, disable_dynamo, get_backend

from .recorder import CHAIN_KINDS, NONFINITE, ROWS, Observer

_MAX_LINES = 32
_EXCLUDED = (
    *(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, polycast.__file__, Path(__file__).parent)),
    str(Path(os.__file__).with_name("contextlib.py")),
)


def call_stack() -> tuple[str, ...]:
    """Return the program's lines on this thread's stack, innermost last, as ``"file.py:12 function"``."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(found) < _MAX_LINES:
        if not frame.f_code.co_filename.startswith(_EXCLUDED):
            found.append(f"{_line(frame)} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


@disable_dynamo
def call_site(region: object) -> tuple[str, bool]:
    """Return the innermost of these lines, as ``"file.py:12"``, and whether a module rule opened the region."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_EXCLUDED):
        frame = frame.f_back
    return "" if frame is None else _line(frame), hasattr(region, "module_rule")


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    try:
        directory = os.getcwd() + os.sep
    except OSError:  # it was removed
        directory = ""
    line = f"{file.removeprefix(directory)}:{frame.f_lineno}"
    return line.encode("utf-8", "backslashreplace").decode("utf-8")  # file names need not be valid Unicode


OBSERVER = NativeLibrary(
    "polycast_plugins.observe", "polycast_observer", "the native engine's observer", folders=("native",)
)


def load_observer() -> Observer:
    """Return the observer of the native engine, building it if necessary.

    Raises:
        RuntimeError: the process runs on the reference engine, or the observer cannot be built.
    """
    observer: Observer = OBSERVER.load("polycast.observe", _bind)
    return observer


def _bind(module: Any, engine: object) -> None:
    module.bind(engine, call_stack, call_site, _captures, ROWS, CHAIN_KINDS, NONFINITE)


def load_backend_of_accelerator() -> None:
    """Load the backend of the current accelerator, if it has one that can be loaded."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        with contextlib.suppress(RuntimeError, ValueError):
            get_backend(accelerator.type)


@disable_dynamo
def _captures(device_type: str) -> bool:
    """Return the answer of a backend that overrides ``is_capturing``, True if it raises; False for other backends."""
    try:
        backend = get_backend(device_type)
    except (RuntimeError, ValueError):
        return False
    try:
        is_own = type(backend).is_capturing is not Backend.is_capturing or "is_capturing" in vars(backend)
        return is_own and bool(backend.is_capturing())
    except (Exception, SystemExit):  # the kernels ask, too, and raise it
        return True
