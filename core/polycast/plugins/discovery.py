"""The backend of one device type: who offers it, loading it, and what came of that.

Plugins are other people's code. One may be missing, of another version, broken at import, in conflict with another or
switched off; none of that may disturb the other devices, and each is told apart in what the user reads. pluggy checks
the hook, but its own entry-point loader imports every plugin and stops at the first broken one, so the walk is ours:
metadata is read once, at the first look-up, and a plugin is imported when its device is first used.
"""

import importlib.metadata
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pluggy
import torch

from ..common import env
from ..errors import BackendBrokenError, BackendConflictError, BackendNotFoundError, InvalidBackendError, warn_user
from ..policy.names import nearest
from ..policy.recipe import Recipe
from . import hookspecs
from .backend import Availability, Backend, validate

BUILT_IN = "polycast"
_PLUGIN_ERRORS = (Exception, SystemExit)  # some libraries exit where they find no device

State: TypeAlias = Literal["ready", "unavailable", "broken", "blocked", "conflict", "missing"]


@dataclass(frozen=True)
class BackendStatus:
    """What is known of the backend of one device type.

    Attributes:
        device_type: the device type.
        state: ``ready``; ``unavailable``: loaded, but the device cannot be used now; ``broken``: its plugin cannot be
            loaded; ``blocked``: by POLYCAST_BLOCK; ``conflict``: several distributions supply it; ``missing``: torch
            has an Autocast key for the device, and nobody supplies a backend.
        reason: why it is not ready; empty where it is.
        default_dtype: the backend's default fast dtype; None where no backend is loaded.
        distribution: the distribution that supplies it; empty for a backend registered by hand, for a
            conflict and where none is.
        version: that distribution's version.
        replaces: the distributions that also supply this device type and are passed over.
    """

    device_type: str
    state: State
    reason: str = ""
    default_dtype: torch.dtype | None = None
    distribution: str = ""
    version: str = ""
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """An entry point that offers a backend; nothing of it is imported yet."""

    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def built_in(self) -> bool:
        """Whether it comes with polycast."""
        return env.canonical_name(self.distribution) == BUILT_IN

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.entry_point.value})"


# Taken to begin an import, and held over a fork.
_gate = threading.Lock()


@dataclass
class Slot:
    """One device type: who offers its backend, and what came of loading it."""

    device_type: str
    blocked: bool = False
    provider: str | None = None
    candidates: list[Candidate] = field(default_factory=list)
    by_hand: Backend | None = None
    loaded: Backend | None = None
    failure: BaseException | None = None
    loading: bool = False
    # Reentrant, so that a plugin that asks for its own device while it is imported is told so and does not hang; one
    # for each slot, so that a slow or stuck plugin holds up nobody else.
    lock: Any = field(default_factory=threading.RLock)

    def backend(self) -> Backend:
        """Return the backend, loading it if this is the first use."""
        ready = self.by_hand or self.loaded
        if ready is not None:
            return ready
        if self.blocked:
            raise BackendNotFoundError(
                f"The backend for {self.device_type!r} is blocked by POLYCAST_BLOCK. Take it out of that variable "
                "to use it."
            )
        with self.lock:
            if self.loaded is None:
                self._load(self.choice())
            assert self.loaded is not None
            return self.loaded

    def choice(self) -> Candidate:
        """Return the candidate that is to serve the device: the named provider, a third party, the built-in."""
        if self.provider is not None:
            matching = [c for c in self.candidates if env.canonical_name(c.distribution) == self.provider]
            if not matching:
                raise ValueError(
                    f"POLYCAST_PROVIDER names {self.provider!r} for {self.device_type!r}, but what is installed for it "
                    f"is: {', '.join(map(str, self.candidates))}. Correct the variable or install that distribution."
                )
        else:
            matching = [c for c in self.candidates if not c.built_in] or self.candidates
        if len(matching) > 1:
            raise BackendConflictError(
                f"{len(matching)} distributions supply the backend for {self.device_type!r}: "
                f"{', '.join(map(str, matching))}. Uninstall all but one, or choose one, such as "
                f"POLYCAST_PROVIDER={self.device_type}={matching[0].distribution}."
            )
        return matching[0]

    def _load(self, candidate: Candidate) -> None:
        if self.loading:
            raise BackendBrokenError(
                f"The backend for {self.device_type!r} was asked for while its plugin {candidate} is being imported. "
                "A plugin must not use its own device at import."
            )
        if self.failure is None:
            with _gate:
                self.loading = True
            try:
                self.loaded = _load_plugin(candidate, self.device_type)
                return
            except _PLUGIN_ERRORS as cause:
                self.failure = cause
            finally:
                self.loading = False
        reason = str(self.failure).rstrip(".")
        raise BackendBrokenError(
            f"The backend for {self.device_type!r} is broken: {candidate} could not be loaded: "
            f"{type(self.failure).__name__}: {reason}. Repair or uninstall {candidate.distribution}, or set "
            f"POLYCAST_BLOCK={self.device_type}."
        ) from self.failure

    def status(self) -> BackendStatus:
        """Return what ``backends()`` says of the device; loads the backend, raises nothing that a plugin raised."""
        try:
            backend = self.backend()
        except BackendConflictError as conflict:
            return BackendStatus(self.device_type, "conflict", str(conflict))
        except BackendNotFoundError as refusal:
            return BackendStatus(self.device_type, "blocked", str(refusal))
        except BackendBrokenError as failure:
            return self._described("broken", str(failure), None)
        answer = check_availability(backend)
        return self._described("ready" if answer else "unavailable", answer.reason, backend.default_dtype)

    def _described(self, state: State, reason: str, dtype: torch.dtype | None) -> BackendStatus:
        chosen = None if self.by_hand is not None else self.choice()
        return BackendStatus(
            self.device_type,
            state,
            reason,
            dtype,
            chosen.distribution if chosen else "",
            chosen.version if chosen else "",
            tuple(str(candidate) for candidate in self.candidates if candidate is not chosen),
        )


class Loads:
    """A lock that ends the imports of plugins and lets none begin: the child of a fork could never finish one.

    It is not waited for longer than some seconds: a plugin may hang.
    """

    def __init__(self, loading: Callable[[], Iterable[Slot]]) -> None:
        self._loading = loading
        self._held: list[Any] = []

    def acquire(self) -> bool:
        """Wait for the imports that there are."""
        _gate.acquire()
        self._held = [slot.lock for slot in self._loading() if slot.lock.acquire(timeout=10)]
        return True

    def release(self) -> None:
        """Let imports begin again."""
        for lock in self._held:
            lock.release()
        _gate.release()


def _load_plugin(candidate: Candidate, device_type: str) -> Backend:
    """Import a plugin and call its hook, in a plugin manager of its own: a rejected one leaves nothing behind."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(candidate.entry_point.load(), name=candidate.distribution)
    manager.check_pending()
    answers: list[Any] = manager.hook.polycast_backend()
    if len(answers) != 1:
        raise InvalidBackendError(
            f"{candidate.entry_point.value} must implement the hook polycast_backend (marked with @polycast.hookimpl) "
            f"and return a Backend from it; got {len(answers)} answers"
        )
    return validate(answers[0], device_type)


def check_availability(backend: Backend) -> Availability:
    """Return the answer of a backend's availability check; an exception of its making is an answer too."""
    try:
        answer = backend.availability()
    except _PLUGIN_ERRORS as cause:
        return _failed(cause)
    return answer if isinstance(answer, Availability) else _no_answer("availability", answer)


def check_dtype(backend: Backend, dtype: torch.dtype) -> Availability:
    """Return what a backend says of a fast dtype; an exception of its making is an answer too."""
    try:
        answer = backend.dtype_availability(dtype)
    except _PLUGIN_ERRORS as cause:
        return _failed(cause)
    return answer if isinstance(answer, Availability) else _no_answer("dtype_availability", answer)


def check_recipe(backend: Backend, recipe: Recipe) -> Availability:
    """Return what a backend says of a recipe; an exception of its making is an answer too."""
    try:
        answer = backend.recipe_availability(recipe)
    except _PLUGIN_ERRORS as cause:
        return _failed(cause)
    return answer if isinstance(answer, Availability) else _no_answer("recipe_availability", answer)


def _failed(cause: BaseException) -> Availability:
    return Availability(False, str(cause) or type(cause).__name__)


def _no_answer(check: str, answer: object) -> Availability:
    return Availability(False, f"{check}() returned {answer!r}, expected a polycast.Availability")


def discover() -> dict[str, Slot]:
    """Read the metadata of what is installed; imports nothing of it."""
    third_party, blocked, providers = env.discovery(), env.blocked(), env.providers()
    found = importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    offered = {entry_point.name for entry_point in found}
    _warn_of_unknown("POLYCAST_BLOCK", blocked, offered)
    _warn_of_unknown("POLYCAST_PROVIDER", providers, offered)
    candidates = [Candidate(*_name_and_version(entry_point), entry_point) for entry_point in found]
    slots: dict[str, Slot] = {}
    for candidate in sorted(candidates, key=str):  # a folder lists its distributions in any order
        if candidate.built_in or third_party:
            name = candidate.entry_point.name
            slot = slots.setdefault(name, Slot(name, blocked=name in blocked, provider=providers.get(name)))
            slot.candidates.append(candidate)
    return slots


def _warn_of_unknown(variable: str, named: Iterable[str], offered: Iterable[str]) -> None:
    """Warn of device types that a variable names and nobody offers a backend for: it does nothing for them."""
    for device_type in sorted(set(named) - set(offered)):
        alike = nearest(device_type, offered)
        warn_user(
            f"{variable} names {device_type!r}, which no installed distribution offers a backend for: "
            + (f"did you mean {alike[0]!r}?" if alike else f"expected one of {', '.join(sorted(offered))}.")
        )


def _name_and_version(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    distribution = entry_point.dist
    assert distribution is not None  # entry_points() always sets it
    try:
        name, version = distribution.name, distribution.version
    except Exception:  # what is left of a half-removed one has no metadata; what that raises differs between Pythons
        name = version = ""
    return name or "(nameless)", version or "(no version)"
