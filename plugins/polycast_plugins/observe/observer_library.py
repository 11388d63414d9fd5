"""Load the observer: a C++ library that counts what the native engine and torch run.

It is separate from the engine, so that programs which observe nothing need not build it.
"""

import threading
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

from .call_sites import call_site, call_stack
from .recorder import CHAIN_KINDS, NONFINITE, Observer

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
