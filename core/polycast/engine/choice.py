"""Choose the engine that runs regions and kernels: at the first region, for the life of the process."""

import functools
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..common import env
from ..common.atfork import hold_during_fork
from ..common.interrupts import raise_if_callers
from ..errors import warn_user
from ..policy.cast_policy import CastPolicy
from ..registry.backend import Backend
from ..torch_internals.dispatcher import excluded_keys
from ..torch_internals.lookup import warn_of_missing
from . import state
from .casts.cast_cache import CastCache, CastStore
from .kernels import Kernels


class Engine(state.StateMachine, Protocol):
    """An engine: runs regions and kernels.

    Attributes:
        name: ``"native"`` or ``"reference"``.
        origin: where its library came from, in words; empty for the engine in Python.
    """

    name: str
    origin: str

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy], /) -> Kernels:
        """Install a backend's kernels for the ops of `policies`."""

    def watch_writes(self) -> None:
        """Watch for writes to weights that do not increment the version."""

    def unwatch_writes(self) -> None:
        """Undo :meth:`watch_writes`."""


class _Unchosen:
    """The state machine until an engine is chosen: no thread is in a region, and entering one chooses."""

    def enter(self, owner: object, settings: state.Settings) -> bool:
        return choose_engine().enter(owner, settings)

    def leave(self, owner: object) -> bool | None:
        return choose_engine().leave(owner)

    def last(self) -> None:
        return None

    def open_regions(self, device_type: str) -> int:
        return 0

    def runs_kernel(self, device_type: str) -> bool:
        return False

    def innermost(self, device_type: str) -> tuple[None, None]:
        return None, None

    def nesting(self, device_type: str) -> int:
        return 0

    def dtype(self, device_type: str) -> torch.dtype:
        return torch.get_autocast_dtype(device_type)

    def excluded_keys(self) -> int:
        return excluded_keys()

    def prepacked(self, *args: Any) -> Any:
        return choose_engine().prepacked(*args)

    def store(self, cache: CastCache) -> CastStore:
        return choose_engine().store(cache)

    def forget_actions(self) -> None:
        pass

    def set_recomputing(self, backward: int | None) -> None:
        pass

    def clear_own_casts(self, all_threads: bool) -> None:
        pass

    def region_methods(self, *_: object) -> None:
        return None


_engine: Engine | None = None
_build_failure = ""
"""Why the native engine could not be built, if that is why the reference engine was chosen."""
_lock = threading.RLock()
hold_during_fork(lambda: [_lock])

state.set_state_machine(_Unchosen())


def choose_engine() -> Engine:
    """Return the engine; choose it if necessary: the one that POLYCAST_ENGINE names, or the native one if it builds.

    Raises:
        ValueError: POLYCAST_ENGINE has an invalid value.
        RuntimeError: POLYCAST_ENGINE is ``native``, and that engine cannot be built.
    """
    global _engine
    if _engine is not None:
        return _engine
    wanted, failure = env.engine(), None
    if wanted != "reference":
        with _lock:  # in a child that is forked during an import, the import would hang
            from ..toolchain.load import try_build  # imported here because it is slow to import
            from .native.engine_library import ENGINE

        failure = try_build(ENGINE)
    with _lock:
        if _engine is None:
            _engine = _choose(wanted, failure)
            state.set_state_machine(_engine)
            warn_of_missing()
        return _engine


def chosen() -> Engine | None:
    """Return the engine; None if none is chosen yet."""
    return _engine


def build_failure() -> str:
    """Return why the native engine could not be built; empty unless the reference engine runs because of that."""
    return _build_failure


def reset_engine() -> None:
    """Let the next region choose an engine; no region may be open and no kernels installed."""
    global _engine
    with _lock:
        _engine = None
        state.set_state_machine(_Unchosen())


@functools.cache
def _reference() -> Engine:
    """Return this process's reference engine."""
    from .reference.engine import ReferenceEngine

    return ReferenceEngine()


def _choose(wanted: str, failure: Exception | None) -> Engine:
    global _build_failure
    _build_failure = ""
    if wanted == "reference":
        return _reference()
    from ..toolchain.cpp_library import BuildError
    from .native import engine_library

    try:
        if failure is not None:
            raise failure
        return engine_library.load()
    # A broken installation of torch's headers or of Python may raise anything.
    except Exception as error:
        raise_if_callers(error)
        reason = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}."
        if wanted == "native":
            raise RuntimeError(f"POLYCAST_ENGINE=native, but the native engine cannot be built: {reason}") from error
    _build_failure = reason
    warn_user(
        f"polycast runs on its reference engine, which is slower: the native engine cannot be built: {reason} "
        "Set POLYCAST_ENGINE=reference to silence this warning."
    )
    return _reference()
