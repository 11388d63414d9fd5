"""Load the backend of a device type from the plugins that offer one.

A plugin may be missing, incompatible, broken at import, in conflict with another, or blocked. Such a plugin affects its
own device only, and the user reads what is wrong with it.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from ..common.announce import announce_if_slow
from ..common.env import canonical_name
from ..common.importing import acquire, importing
from ..errors import (
    CALLERS_ERRORS,
    PLUGIN_ERRORS,
    BackendBrokenError,
    BackendConflictError,
    BackendNotFoundError,
    is_interrupt,
)
from ..torch_internals.callers_state import call_outside
from ..torch_internals.dispatcher import disable_autocast
from .backend import Availability, Backend
from .checks import check_availability
from .hookspecs import Candidate
from .validation import validate

State: TypeAlias = Literal["ready", "unavailable", "broken", "blocked", "conflict", "missing"]


@dataclass(frozen=True)
class BackendStatus:
    """The status of the backend of one device type.

    Attributes:
        device_type: the device type.
        state: ``ready``; ``unavailable``: loaded, but the device cannot be used now; ``broken``: its plugin cannot be
            loaded; ``blocked``: by POLYCAST_BLOCK; ``conflict``: several distributions supply it; ``missing``: torch
            has an Autocast key for the device, but no backend is installed.
        reason: why it is not ready; empty if it is.
        default_dtype: the backend's default fast dtype; None if no backend is loaded.
        distribution: the distribution that supplies it; empty for a backend registered by hand, for a
            conflict, and if there is none.
        version: the version of that distribution.
        replaces: the distributions that supply this device type too, and are not used.
        extensions: what other packages add to the device, in the order in which their kernels are asked; with why, if
            one of them is broken or cannot be used now.
        ops_in_cpp: the packages with C++ ops of the backend, and of the extensions that can be used.
    """

    device_type: str
    state: State
    reason: str = ""
    default_dtype: torch.dtype | None = None
    distribution: str = ""
    version: str = ""
    replaces: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    ops_in_cpp: tuple[str, ...] = ()


@dataclass
class BackendLoader:
    """Chooses and loads the backend of one device type."""

    device_type: str
    blocked: bool = False
    provider: str | None = None
    candidates: list[Candidate] = field(default_factory=list)
    by_hand: Backend | None = None
    loaded: Backend | None = None
    failure: BaseException | None = None
    _loading: bool = field(default=False, init=False)
    # Reentrant, so that a plugin that uses its own device at import gets an error instead of a deadlock. One for each
    # device, so that a slow plugin holds up no other.
    _lock: Any = field(default_factory=threading.RLock, init=False)

    @property
    def current(self) -> Backend | None:
        """The backend registered by hand, or else the one that is loaded; None if there is neither."""
        return self.by_hand or self.loaded

    def get(self) -> Backend:
        """Return the backend, loading it at its first use."""
        backend = self.current
        if backend is not None:
            return backend
        if self.blocked:
            raise BackendNotFoundError(
                f"The backend for {self.device_type!r} is blocked by POLYCAST_BLOCK. Take it out of that variable "
                "to use it."
            )
        if not acquire(self._lock):
            raise self._requested_at_import(self._choose())
        try:
            if self.loaded is None:
                self.loaded = self._load(self._choose())
            return self.loaded
        finally:
            self._lock.release()

    @property
    def distribution(self) -> tuple[str, str]:
        """The name and version of the distribution that supplies the backend."""
        chosen = self._choose()
        return chosen.distribution, chosen.version

    def status(self) -> BackendStatus:
        """Load the backend and return its status. Errors of the plugin are part of the status."""
        try:
            backend = self.get()
        except BackendConflictError as error:
            return BackendStatus(self.device_type, "conflict", str(error))
        except BackendNotFoundError as error:
            return BackendStatus(self.device_type, "blocked", str(error))
        except BackendBrokenError as error:
            return self._status("broken", str(error), None)
        try:
            with self._announced_if_slow("asking", " whether the device can be used"):
                answer = check_availability(backend)
        except Warning as error:  # a filter turned it into an error: those who list devices get all of them
            answer = Availability(False, str(error) or type(error).__name__)
        return self._status("ready" if answer else "unavailable", answer.reason, backend.default_dtype)

    def reset(self) -> None:
        """Forget the threads of the parent; called in the child of a fork."""
        self._lock, self._loading = threading.RLock(), False

    def _choose(self) -> Candidate:
        """Return the candidate to load: the named provider, else a third party's, else the built-in one."""
        if self.provider is not None:
            matching = [each for each in self.candidates if canonical_name(each.distribution) == self.provider]
            if not matching:
                raise ValueError(
                    f"POLYCAST_PROVIDER names {self.provider!r} for {self.device_type!r}, but what is installed for it "
                    f"is: {', '.join(map(str, self.candidates))}. Correct the variable or install that distribution."
                )
        else:
            matching = [each for each in self.candidates if not each.built_in] or self.candidates
        if len(matching) > 1:
            raise BackendConflictError(
                f"{len(matching)} distributions supply the backend for {self.device_type!r}: "
                f"{', '.join(map(str, matching))}. Uninstall all but one, or choose one, such as "
                f"POLYCAST_PROVIDER={self.device_type}={matching[0].distribution}."
            )
        return matching[0]

    def _load(self, candidate: Candidate) -> Backend:
        if self._loading:
            raise self._requested_at_import(candidate)
        failure = self.failure
        if failure is None:
            self._loading = True
            try:
                with importing(), self._announced_if_slow("importing"), disable_autocast():
                    return call_outside(_load_plugin, candidate, self.device_type)
            except PLUGIN_ERRORS as error:
                if is_interrupt(error):
                    raise
                failure = error
                if not isinstance(error, CALLERS_ERRORS):
                    self.failure = error
            finally:
                self._loading = False
        reason = str(failure).rstrip(".")
        raise BackendBrokenError(
            f"The backend for {self.device_type!r} is broken: {candidate} could not be loaded: "
            f"{type(failure).__name__}: {reason}. Repair or uninstall {candidate.distribution}, or set "
            f"POLYCAST_BLOCK={self.device_type}."
        ) from failure

    def _requested_at_import(self, candidate: Candidate) -> BackendBrokenError:
        return BackendBrokenError(
            f"The backend for {self.device_type!r} was requested while its plugin {candidate} is being imported. A "
            "plugin must not use its own device at import."
        )

    def _announced_if_slow(self, doing: str, rest: str = "") -> AbstractContextManager[None]:
        """Return a context manager that names the plugin on stderr if the block is slow, unless polycast has it."""
        candidate = self._choose() if self.by_hand is None else None
        if candidate is None or candidate.built_in:
            return nullcontext()
        return announce_if_slow(
            f"still {doing} the plugin of {self.device_type!r}, {candidate}{rest}. POLYCAST_BLOCK={self.device_type} "
            "leaves it out."
        )

    def _status(self, state: State, reason: str, dtype: torch.dtype | None) -> BackendStatus:
        used = None if self.by_hand is not None else self._choose()
        return BackendStatus(
            self.device_type,
            state,
            reason,
            dtype,
            used.distribution if used else "",
            used.version if used else "",
            tuple(str(candidate) for candidate in self.candidates if candidate is not used),
        )


def _load_plugin(candidate: Candidate, device_type: str) -> Backend:
    return validate(candidate.call_hook("polycast_backend", "Backend"), device_type)
