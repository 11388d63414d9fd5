"""`NativeLibrary`: C++ of a plugin that works on the native engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..common.atfork import fork_safe_lock
from ..toolchain.cpp_library import BuildError, CppLibrary
from ..toolchain.load import BuildableLibrary, import_extension, load, try_build
from .choice import choose_engine

_HEADERS = "polycast.engine.native:common"
_lock = fork_safe_lock()
_loaded: dict[tuple[CppLibrary, Any], Any] = {}
"""The modules, by library and engine."""


@dataclass(frozen=True)
class NativeLibrary(BuildableLibrary):
    """C++ sources in a plugin's package, compiled into an extension module for the native engine of this process.

    They may include the engine's headers in :file:`engine/native/common`, of which :file:`observing.h` declares what
    the engine offers, and nothing else of the engine. ``polycast build`` compiles them ahead of their first use: it
    calls ``build()``, also of the library of the engine itself and of those of ops.

    Attributes:
        package: the package that contains the sources.
        name: the name of the module.
        description: what messages call it, such as ``"the native engine's observer"``.
        folders: the folders of the package that contain the sources; ``"."`` is the package itself.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "folders", (*self.folders, _HEADERS))

    @staticmethod
    def of_engine() -> BuildableLibrary:
        """Return the library of the engine itself."""
        from .native.engine_library import ENGINE

        return ENGINE

    def load(self, user: str, bind: Callable[[Any, object], object]) -> Any:
        """Return the module, compiled, imported and bound to the engine if that has not been done.

        Args:
            user: what needs the module, for errors, such as ``"polycast.observe"``.
            bind: called once for each engine, with the module and with a capsule of the engine (`Engine` in
                :file:`observing.h`).

        Raises:
            RuntimeError: this process runs on the reference engine, or the module cannot be compiled or imported.

        Warns:
            UserWarning: the cache of builds cannot be trusted, so that it was built for this process alone.
        """
        engine: Any = choose_engine()
        found = _loaded.get((self, engine))
        if found is not None:
            return found
        if engine.name != "native":
            why = "POLYCAST_ENGINE=reference. Unset it."
            if engine.build_failure:
                why = f"the native engine cannot be built: {engine.build_failure}"
            raise RuntimeError(
                f"{user} needs the native engine, and this process runs on the {engine.name} engine: {why}"
            )
        try:
            failure = try_build(self)  # before taking the lock: a fork waits for the lock, not for the compiler
            if failure is not None:
                raise failure
            with _lock:
                if (self, engine) not in _loaded:
                    # Otherwise it would be built from other headers than the engine.
                    if self.of_engine().read_sources() != engine.sources:
                        raise BuildError(
                            "the C++ of polycast has changed since its engine was loaded. Restart the program."
                        )
                    module: Any = load(self, import_extension)[0]
                    bind(module, engine.observing())
                    _loaded[self, engine] = module
                return _loaded[self, engine]
        except BuildError as error:
            raise RuntimeError(f"{user} needs C++ that cannot be built: {error}") from error
