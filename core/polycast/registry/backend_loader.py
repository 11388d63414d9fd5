"""Load the backend of a device type from the plugins that offer one.

A plugin may be missing, incompatible, broken at import, in conflict with another, or blocked. Such a plugin affects its
own device only, and the user reads what is wrong with it.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..common.announce import announce_if_slow, log
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
from .backend import Backend
from .hookspecs import Candidate
from .validation import validate


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

    @property
    def is_used(self) -> bool:
        """Whether there is a backend, or it is being loaded."""
        return self._loading or self.current is not None

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
            raise self._requested_at_import(self.choose())
        chosen = None
        try:
            if self.loaded is None:
                chosen = self.choose()
                self.loaded = self._load(chosen)
            backend = self.loaded
            if backend is None:
                raise BackendNotFoundError(
                    f"No polycast backend is installed for {self.device_type!r}, and {chosen}, which serves devices "
                    "without one, did not find working is_available() and get_amp_supported_dtype() in "
                    f"torch.{self.device_type}. Import the package of the device first, or install one with a backend."
                )
        finally:
            self._lock.release()
        if chosen is not None:
            for each in self.candidates:
                log.info("%s: %s: %s", self.device_type, "backend" if each is chosen else "passed over", each)
        return backend

    @property
    def distribution(self) -> tuple[str, str]:
        """The name and version of the distribution that supplies the backend."""
        chosen = self.choose()
        return chosen.distribution, chosen.version

    def reset(self) -> None:
        """Forget the threads of the parent; called in the child of a fork."""
        self._lock, self._loading = threading.RLock(), False

    def choose(self) -> Candidate:
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
        if not matching:
            raise BackendNotFoundError(f"No backend is installed for {self.device_type!r}.")
        if len(matching) > 1:
            raise BackendConflictError(
                f"{len(matching)} distributions supply the backend for {self.device_type!r}: "
                f"{', '.join(map(str, matching))}. Uninstall all but one, or choose one, such as "
                f"POLYCAST_PROVIDER={self.device_type}={matching[0].distribution}."
            )
        return matching[0]

    def _load(self, candidate: Candidate) -> Backend | None:
        if self._loading:
            raise self._requested_at_import(candidate)
        failure = self.failure
        if failure is None:
            self._loading = True
            try:
                with importing(), self.announced_if_slow("importing"), disable_autocast():
                    return call_outside(_load_plugin, candidate, self.device_type)
            except PLUGIN_ERRORS as error:
                if is_interrupt(error):
                    raise
                failure = error
                if not isinstance(error, CALLERS_ERRORS):
                    self.failure = error
            finally:
                self._loading = False
        raise BackendBrokenError(
            f"The backend for {self.device_type!r} is broken: {candidate} could not be loaded: "
            f"{type(failure).__name__}: {failure}\nRepair or uninstall {candidate.distribution}, or set "
            f"POLYCAST_BLOCK={self.device_type}."
        ) from failure

    def _requested_at_import(self, candidate: Candidate) -> BackendBrokenError:
        others = [each.entry_point.value for each in self.candidates if each is not candidate]
        remedy = "".join(
            f" To build on the backend of {value}, import its class from there, or write a polycast.plugin.Extension, "
            "which adds policies and kernels to it."
            for value in others[:1]
        )
        return BackendBrokenError(
            f"The backend for {self.device_type!r} was requested while its plugin {candidate} is being imported. A "
            f"plugin must not use its own device at import.{remedy}"
        )

    def announced_if_slow(self, doing: str, rest: str = "") -> AbstractContextManager[None]:
        """Return a context manager that names the plugin on stderr if the block is slow, unless polycast has it."""
        candidate = self.choose() if self.by_hand is None else None
        if candidate is None or candidate.built_in:
            return nullcontext()
        return announce_if_slow(
            f"still {doing} the plugin of {self.device_type!r}, {candidate}{rest}. POLYCAST_BLOCK={self.device_type} "
            "leaves it out."
        )


def _load_plugin(candidate: Candidate, device_type: str) -> Backend | None:
    backend = candidate.call_hook("polycast_backend", "Backend", device_type)
    return None if backend is None else validate(backend, device_type)
