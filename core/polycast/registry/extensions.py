"""`DeviceExtensions`: what packages add to a device that another package serves.

A broken extension affects only itself: the device goes on without it, and a warning names it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ..common.announce import announce_if_slow, log
from ..common.importing import acquire, importing
from ..errors import PLUGIN_ERRORS, BackendBrokenError, BackendConflictError, raise_if_callers_at_import, warn_user
from ..policy.cast_policy import CastPolicy
from ..torch_internals.callers_state import call_outside
from ..torch_internals.dispatcher import disable_autocast
from .backend import Backend, Extension
from .checks import ask
from .hookspecs import Candidate
from .validation import validate_extension


class _Answer(NamedTuple):
    """An extension that can be used, or why one cannot: it is broken, or says that it is not available."""

    candidate: Candidate
    extension: Extension | None = None
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.candidate} {self.problem.rstrip('.')}".rstrip()


class AddedPolicy(NamedTuple):
    """The policy of an op, and the distribution whose extension adds it."""

    policy: CastPolicy
    distribution: str


class DeviceExtensions:
    """Loads the extensions of a device type, when the device is first used.

    Attributes:
        candidates: the entry points that offer one, in the order in which their kernels are asked.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.candidates: list[Candidate] = []
        self._answers: list[_Answer] | None = None
        self._doing: Literal["", "importing", "asking"] = ""
        self._checked: tuple[Backend, Mapping[str, AddedPolicy]] | None = None
        self._lock: Any = threading.RLock()  # reentrant, as that of a BackendLoader

    def get(self) -> Sequence[Extension]:
        """Return the extensions that can be used; load them at the first use, and warn of broken ones."""
        return [extension for _, extension in self._usable()]

    def distribution(self, extension: Extension) -> tuple[str, str]:
        """Return the name and the version of the distribution that an extension comes from."""
        found = (candidate for candidate, each in self._usable() if each is extension)
        return next(((each.distribution, each.version) for each in found), ("", ""))

    def policies(self, backend: Backend) -> Mapping[str, AddedPolicy]:
        """Return the policies that extensions add to the table of a backend.

        Raises:
            BackendConflictError: two packages give an op different policies.
        """
        checked = self._checked
        if checked is None or checked[0] is not backend:
            checked = backend, MappingProxyType(self._merged(backend))
            if self.are_known:
                self._checked = checked
        return checked[1]

    @property
    def are_known(self) -> bool:
        """Whether all are loaded, and have been asked whether they can be used."""
        return self._answers is not None or not self.candidates

    def names(self) -> tuple[str, ...]:
        """Return the extensions by distribution and entry point, with why, if one cannot be used."""
        return tuple(map(str, self._load()))

    def _merged(self, backend: Backend) -> dict[str, AddedPolicy]:
        policies: dict[str, AddedPolicy] = {}
        sources: dict[str, Candidate] = {}
        for candidate, extension in self._usable():
            for op, policy in extension.policies.items():
                if op in backend.policies:
                    continue
                if op not in policies:
                    policies[op], sources[op] = AddedPolicy(policy, candidate.distribution), candidate
                elif policies[op].policy is not policy:
                    raise BackendConflictError(
                        f"Two packages give {op!r} different policies on {self.device_type!r}: {sources[op]} gives "
                        f"{policies[op].policy.name}, and {candidate} {policy.name}. Uninstall one of them."
                    )
        return policies

    def _usable(self) -> list[tuple[Candidate, Extension]]:
        return [(each.candidate, each.extension) for each in self._load() if each.extension is not None]

    def _load(self) -> Sequence[_Answer]:
        """Return the answers of all candidates; none while they are asked whether they can be used."""
        if self._answers is None and self.candidates:
            new: Sequence[_Answer] = ()
            is_acquired = acquire(self._lock)
            try:
                if not is_acquired or self._doing == "importing":
                    raise BackendBrokenError(
                        f"The device {self.device_type!r} was requested while an extension of it is being imported. An "
                        "extension must not use its own device at import."
                    )
                if self._doing == "asking":
                    return ()
                if self._answers is None:
                    new = self._load_all()
            finally:
                if is_acquired:
                    self._lock.release()
            for each in new:
                log.info("%s: extension: %s", self.device_type, each)
        return self._answers or ()

    def _load_all(self) -> Sequence[_Answer]:
        try:
            with importing():  # also when they are asked: they may import what they need then
                self._doing = "importing"
                answers = [_tried(self._import, _Answer(each)) for each in self.candidates]
                self._doing = "asking"
                answers = [each if each.problem else _tried(_asked, each) for each in answers]
        finally:
            self._doing = ""
        self._answers = answers
        for each in answers:  # once they are kept: a filter may turn this warning into an error
            if each.problem.startswith("is broken"):
                warn_user(
                    f"An extension of {self.device_type!r} is left out: {each}\nRepair or uninstall "
                    f"{each.candidate.distribution}."
                )
        return answers

    def _import(self, answer: _Answer) -> _Answer:
        candidate = answer.candidate
        waiting = (
            f"still importing an extension of {self.device_type!r}, {candidate}. POLYCAST_DISCOVERY=0 leaves it out."
        )
        with nullcontext() if candidate.built_in else announce_if_slow(waiting), disable_autocast():
            return answer._replace(extension=call_outside(_called, candidate, self.device_type))

    def reset(self) -> None:
        """Forget the threads of the parent; called in the child of a fork."""
        self._lock, self._doing = threading.RLock(), ""


def _called(candidate: Candidate, device_type: str) -> Extension:
    return validate_extension(candidate.call_hook("polycast_extension", "Extension", device_type), device_type)


def _asked(answer: _Answer) -> _Answer:
    assert answer.extension is not None
    available = ask(answer.extension)
    return answer if available else answer._replace(extension=None, problem=f"cannot be used: {available.reason}")


def _tried(function: Callable[[_Answer], _Answer], answer: _Answer) -> _Answer:
    """Return what a function makes of an answer, which may run code of the extension; or that this is broken."""
    try:
        return function(answer)
    except PLUGIN_ERRORS as error:
        raise_if_callers_at_import(error)
        return answer._replace(extension=None, problem=f"is broken: {type(error).__name__}: {error}")
