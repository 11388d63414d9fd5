"""`DeviceExtensions`: what packages add to a device that another package serves.

A broken extension affects only itself: the device goes on without it, and a warning names it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ..common.announce import announce_if_slow
from ..common.importing import acquire, importing
from ..errors import PLUGIN_ERRORS, BackendBrokenError, BackendConflictError, raise_if_callers_at_import, warn_user
from ..policy.cast_policy import CastPolicy
from ..torch_internals.callers_state import call_outside
from ..torch_internals.dispatcher import disable_autocast
from .backend import Availability, Backend, Extension, validate_extension
from .candidate import Candidate
from .checks import check_availability


class LoadedExtension(NamedTuple):
    """An extension, the entry point that it comes from, and whether it can be used."""

    candidate: Candidate
    extension: Extension
    availability: Availability


class BrokenExtension(NamedTuple):
    """The entry point of an extension that cannot be imported, or asked whether it can be used; and why."""

    candidate: Candidate
    error: BaseException


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
        self._answers: list[LoadedExtension | BrokenExtension] | None = None
        self._doing: Literal["", "importing", "asking"] = ""
        self._checked: tuple[Backend, Mapping[str, AddedPolicy]] | None = None
        self._lock: Any = threading.RLock()  # reentrant, as that of a BackendLoader

    def get(self) -> Sequence[Extension]:
        """Return the extensions that can be used; load them at the first use, and warn of broken ones."""
        return [each.extension for each in self._usable()]

    def distribution(self, extension: Extension) -> tuple[str, str]:
        """Return the name and the version of the distribution that an extension comes from."""
        found = (each.candidate for each in self._usable() if each.extension is extension)
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
        return tuple(map(_described, self._load())) if self.candidates else ()

    def _merged(self, backend: Backend) -> dict[str, AddedPolicy]:
        policies: dict[str, AddedPolicy] = {}
        sources: dict[str, Candidate] = {}
        for each in self._usable():
            for op, policy in each.extension.policies.items():
                if op in backend.policies:
                    continue
                if op not in policies:
                    policies[op], sources[op] = AddedPolicy(policy, each.candidate.distribution), each.candidate
                elif policies[op].policy is not policy:
                    raise BackendConflictError(
                        f"Two packages give {op!r} different policies on {self.device_type!r}: {sources[op]} gives "
                        f"{policies[op].policy.name}, and {each.candidate} {policy.name}. Uninstall one of them."
                    )
        return policies

    def _usable(self) -> Iterator[LoadedExtension]:
        for each in self._load() if self.candidates else ():
            if isinstance(each, LoadedExtension) and each.availability:
                yield each

    def _load(self) -> Sequence[LoadedExtension | BrokenExtension]:
        """Return the answers of all candidates; none while they are asked whether they can be used."""
        if self._answers is None:
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
                    self._load_all()
            finally:
                if is_acquired:
                    self._lock.release()
        assert self._answers is not None
        return self._answers

    def _load_all(self) -> None:
        try:
            with importing():  # also when they are asked: they may import what they need then
                self._doing = "importing"
                extensions = [_tried(self._import, each) for each in self.candidates]
                self._doing = "asking"
                answers = [
                    each if isinstance(each, BaseException) else _tried(check_availability, each) for each in extensions
                ]
        finally:
            self._doing = ""
        self._answers = [
            BrokenExtension(candidate, answer)
            if isinstance(answer, BaseException)
            else LoadedExtension(candidate, extension, answer)
            for candidate, extension, answer in zip(self.candidates, extensions, answers, strict=True)
        ]
        for each in self._answers:  # once they are kept: a filter may turn this warning into an error
            if isinstance(each, BrokenExtension):
                warn_user(
                    f"An extension of {self.device_type!r} is left out: {_described(each)}. Repair or uninstall "
                    f"{each.candidate.distribution}."
                )

    def _import(self, candidate: Candidate) -> Extension:
        waiting = (
            f"still importing an extension of {self.device_type!r}, {candidate}. POLYCAST_DISCOVERY=0 leaves it out."
        )
        with nullcontext() if candidate.built_in else announce_if_slow(waiting), disable_autocast():
            return call_outside(_called, candidate, self.device_type)

    def reset(self) -> None:
        """Forget the threads of the parent; called in the child of a fork."""
        self._lock, self._doing = threading.RLock(), ""


def _tried(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return what a function of an extension returns, or the exception that it raises."""
    try:
        return function(argument)
    except PLUGIN_ERRORS as error:
        raise_if_callers_at_import(error)
        return error


def _called(candidate: Candidate, device_type: str) -> Extension:
    return validate_extension(candidate.call_hook("polycast_extension", "Extension"), device_type)


def _described(answer: LoadedExtension | BrokenExtension) -> str:
    if isinstance(answer, BrokenExtension):
        error = answer.error
        return f"{answer.candidate} is broken: {type(error).__name__}: {str(error).rstrip('.')}"
    available = answer.availability
    return f"{answer.candidate}" if available else f"{answer.candidate} cannot be used: {available.reason.rstrip('.')}"
