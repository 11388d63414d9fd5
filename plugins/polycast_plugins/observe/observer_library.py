"""Load the observer: a C++ library that counts what the native engine and torch run.

It is separate from the engine, so that programs which observe nothing need not build it.
"""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from polycast.common.interrupts import raise_if_callers
from polycast.engine.choice import build_failure, choose_engine
from polycast.engine.disable_dynamo import disable_dynamo
from polycast.plugin import hold_during_fork
from polycast.registry.backend import overrides_is_capturing
from polycast.registry.checks import PLUGIN_ERRORS
from polycast.registry.registry import registry
from polycast.toolchain.cache_folder import cache_directory
from polycast.toolchain.cpp_library import BuildError, CppLibrary

from .recorder import CHAIN_KINDS, NONFINITE, Observer

_MAX_LINES = 32
_EXCLUDED = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent.parent) + os.sep,
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


if TYPE_CHECKING:
    from polycast.engine.native.engine import NativeEngine

OBSERVER = CppLibrary(
    "polycast_plugins.observe",
    "polycast_observer",
    "the native engine's observer",
    "`polycast build` tries again",
    ("native", "polycast.engine.native:common"),
)
_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_observers: "dict[NativeEngine, Observer]" = {}


def load_observer() -> Observer:
    """Return the observer of the native engine, building it if necessary.

    Raises:
        RuntimeError: the process runs on the reference engine, or the observer cannot be built.
    """
    engine: Any = choose_engine()
    if engine.name != "native":
        reason = build_failure()
        why = f"the native engine cannot be built: {reason}" if reason else "POLYCAST_ENGINE=reference. Unset it."
        raise RuntimeError(
            f"polycast.observe needs the native engine, and this process runs on the {engine.name} engine, which "
            f"cannot be observed: {why}"
        )
    try:
        if engine not in _observers:
            _compile()  # before taking the lock: a fork waits for the lock, and must not wait for the compiler
        with _lock:
            if engine not in _observers:
                _observers[engine] = _bind(engine)
            return _observers[engine]
    except BuildError as error:
        raise RuntimeError(f"polycast.observe needs C++ that cannot be built: {error}") from error


def _compile() -> None:
    from polycast.toolchain.load import try_build  # imported here because it is slow to import

    failure = try_build(OBSERVER)
    if failure is not None:
        raise failure


def _bind(engine: "NativeEngine") -> Observer:
    from polycast.engine.native.engine_library import ENGINE
    from polycast.toolchain.load import import_extension, load_built, load_prebuilt

    if ENGINE.read_sources() != engine.sources:  # the library would be built from other headers than the engine
        raise BuildError("the C++ of polycast has changed since its engine was loaded. Restart the program.")
    loaded = load_prebuilt(OBSERVER, import_extension) or load_built(cache_directory(), OBSERVER, import_extension)
    extension: Any = loaded[0]
    extension.bind(engine.observing(), call_stack, call_site, _captures, CHAIN_KINDS, NONFINITE)
    observer: Observer = extension
    return observer


def load_backend_of_accelerator() -> None:
    """Load the backend of the current accelerator, if it has one that can be loaded."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        try:
            registry.find(accelerator.type)
        except PLUGIN_ERRORS as error:
            raise_if_callers(error)


@disable_dynamo
def _captures(device_type: str) -> bool:
    """Return the answer of a backend that overrides ``is_capturing``, True if it raises; False for other backends."""
    backend = registry.loaded(device_type)
    try:
        return backend is not None and overrides_is_capturing(backend) and bool(backend.is_capturing())
    except PLUGIN_ERRORS:  # the kernels ask, too, and raise it
        return True
