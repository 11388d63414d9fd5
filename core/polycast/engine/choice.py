"""Choose the engine that runs regions and kernels: at the first region, for the life of the process."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch

from ..common import env
from ..common.announce import log
from ..common.atfork import fork_safe_lock
from ..errors import raise_if_callers
from ..policy.cast_policy import CastPolicy
from ..registry.backend import Backend
from ..torch_internals.dispatcher import excluded_keys
from ..torch_internals.lookup import warn_of_missing
from . import state
from .kernels import Kernels


class Engine(state.StateMachine, Protocol):
    """An engine: runs regions and kernels.

    Attributes:
        name: ``"native"`` or ``"reference"``.
        origin: where its library came from, in words; empty for the engine in Python.
        build_failure: why the native engine could not be built, if that is why this one runs.
        caches: whether it keeps casts and prepacked weights of a WeightCache or a recipe, and what plans decided for
            calls. Otherwise these are made again at each call.
    """

    name: str
    origin: str
    build_failure: str
    caches: bool

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy], /) -> Kernels:
        """Install a backend's kernels for the ops of `policies`."""

    def watch_writes(self) -> None:
        """Watch for writes to weights that do not increment the version."""

    def unwatch_writes(self) -> None:
        """Undo :meth:`watch_writes`."""


_WITHOUT_REGIONS: Mapping[str, object] = {
    "last": None,
    "open_regions": 0,
    "runs_kernel": False,
    "innermost": (None, None),
    "nesting": 0,
    "forget_actions": None,
    "set_recomputing": None,
    "clear_own_casts": None,
    "region_methods": None,
}
"""The answers of the state machine until an engine is chosen: no thread is in a region then."""


class _Unchosen:
    """The state machine until an engine is chosen, which others of its methods do."""

    dtype = staticmethod(torch.get_autocast_dtype)
    excluded_keys = staticmethod(excluded_keys)

    def __getattr__(self, name: str) -> Any:
        if name not in _WITHOUT_REGIONS:
            return getattr(choose_engine(), name)
        return lambda *_: _WITHOUT_REGIONS[name]


_engine: Engine | None = None
_has_told = False
_lock = fork_safe_lock()

state.set_state_machine(cast("state.StateMachine", _Unchosen()))


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
        is_new = _engine is None
        if _engine is None:
            _engine = _choose(wanted, failure)
            state.set_state_machine(_engine)
            warn_of_missing()
        engine = _engine
    if is_new:
        log.info("the engine is %s: %s", engine.name, engine.origin or engine.build_failure or "by POLYCAST_ENGINE")
    return engine


def chosen() -> Engine | None:
    """Return the engine; None if none is chosen yet."""
    return _engine


def reset_engine() -> None:
    """Let the next region choose an engine; no region may be open and no kernels installed."""
    global _engine, _has_told
    with _lock:
        _engine, _has_told = None, False
        state.set_state_machine(cast("state.StateMachine", _Unchosen()))


def _choose(wanted: str, failure: Exception | None) -> Engine:
    why = ""
    if wanted != "reference":
        from ..toolchain.cpp_library import BuildError
        from .native import engine_library

        try:
            if failure is not None:
                raise failure
            return engine_library.load()
        # A broken installation of torch's headers or of Python may raise anything.
        except Exception as error:
            raise_if_callers(error)
            why = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}."
            if wanted == "native":
                raise RuntimeError(f"POLYCAST_ENGINE=native, but the native engine cannot be built: {why}") from error
    from .reference.engine import REFERENCE

    REFERENCE.build_failure = why
    return REFERENCE


def reference_note(known: str = "") -> str:
    """Return what one warning in a process adds on the reference engine: its cost and, unless `known` has it, why."""
    global _has_told
    reason, told, _has_told = choose_engine().build_failure.rstrip("."), _has_told, True
    why = "" if reason in known else f": the native engine cannot be built: {reason}"
    return f" on polycast's reference engine, which is slower and caches no weights{why}" if reason and not told else ""
