"""Policies by op as people write them: what they mean for the running torch, and how two are put together."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from typing_extensions import override

from .cast_policy import CastPolicy
from .computed_once import computed_once
from .names import MOST_PROBLEMS, OpName, error_of, named, nearest, ops_with, read_op, read_policy

Written = str | dict[str, str | bool]
"""A policy as a file has it: a text, or a table with ``policy`` and ``optional``."""


class _Entry(NamedTuple):
    written: str
    name: OpName
    policy: CastPolicy
    optional: bool


class Ops(Mapping[str, CastPolicy]):
    """Policies by op. Immutable and hashable; the keys are as they were written, and are looked up by what they mean.

    A name with an overload goes before one without. An ``optional`` op may be one that the running torch lacks.
    """

    def __init__(self, ops: object = MappingProxyType({})) -> None:
        """Read a mapping of names to policies.

        Raises:
            ValueError: with a sentence for each problem.
        """
        self._entries: dict[str, _Entry] = {}
        self._found: dict[str, CastPolicy] = {}
        self._missing: list[_Entry] = []
        if isinstance(ops, Ops):
            self._take(ops._entries)
            return
        if not isinstance(ops, Mapping):
            raise ValueError(f"must map op names to CastPolicy, got {type(ops).__name__}")
        entries: dict[str, _Entry] = {}
        problems: list[str] = []
        for written, value in ops.items():
            try:
                entry = _read(written, value)
                if entry.name.key in entries:
                    other = entries[entry.name.key].written
                    raise ValueError(
                        f"{entry.written!r} is named twice" + (f", also as {other!r}" * (other != entry.written))
                    )
                _overloads(entry)
            except (TypeError, ValueError) as error:
                problems.append(str(error))
                if len(problems) == MOST_PROBLEMS:
                    break
            else:
                entries[entry.name.key] = entry
        if problems:
            raise error_of(problems)
        self._take(entries)

    def _take(self, entries: dict[str, _Entry]) -> None:
        self._entries = entries
        self._missing = [entry for entry in entries.values() if not entry.name.overloads]
        self._found = {overload: entry.policy for entry in self._by_rank() for overload in _overloads(entry)}

    def _by_rank(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=lambda entry: entry.name.overload is not None)

    @property
    def resolved(self) -> Mapping[str, CastPolicy]:
        """The policies by overload, by their names in the dispatcher of the running torch."""
        if self._missing and any(entry.name.overloads for entry in self._missing):  # a library was loaded since
            self._take(self._entries)
        return MappingProxyType(self._found)

    def __or__(self, other: object) -> "Ops":
        """Return both, of which `other` wins: what a region with `other` has inside a region with this."""
        if not isinstance(other, Ops):
            return NotImplemented
        if not (self._entries and other._entries):
            return self if self._entries else other
        entries: dict[str, _Entry] = {}
        for key, entry in self._entries.items():
            winner = other._entries.get(key) or other._entries.get(entry.name.qualified)
            if winner is None:
                entries[key] = entry
                continue
            # What the winner cannot have its policy for, it says nothing of.
            for overload in sorted(set(_overloads(entry)) - set(_overloads(winner))):
                name = named(overload)
                if name.key not in self._entries or name.key == key:
                    entries[name.key] = _Entry(name.short, name, entry.policy, entry.optional)
        both = Ops()
        both._take({**entries, **other._entries})
        return both

    def of_same_ops(self, other: "Ops") -> "Ops":
        """Return the part of this that is about ops that `other` names too, be it other overloads of them."""
        known = {entry.name.qualified for entry in other._entries.values()}
        part = Ops()
        part._take({key: entry for key, entry in self._entries.items() if entry.name.qualified in known})
        return part

    @override
    def __getitem__(self, op: object) -> CastPolicy:
        try:
            return self._entries[read_op(op).key].policy
        except (TypeError, ValueError):
            raise KeyError(op) from None

    @override
    def __iter__(self) -> Iterator[str]:
        return (entry.written for entry in self._entries.values())

    @override
    def __len__(self) -> int:
        return len(self._entries)

    @property
    def written(self) -> dict[str, Written]:
        """The mapping that this can be made of again, of texts and bools."""
        return {
            entry.written: {"policy": entry.policy.value, "optional": True} if entry.optional else entry.policy.value
            for entry in self._entries.values()
        }

    @computed_once
    def _meaning(self) -> frozenset[tuple[str, CastPolicy, bool]]:
        return frozenset((key, entry.policy, entry.optional) for key, entry in self._entries.items())

    @property
    def by_meaning(self) -> dict[str, Written]:
        """As `written`, with the shortest name for each key, sorted: the same for values that are equal."""
        written = self.written
        return {entry.name.short: written[entry.written] for _, entry in sorted(self._entries.items())}

    @override
    def __eq__(self, other: object) -> bool:
        return self._meaning == other._meaning if isinstance(other, Ops) else NotImplemented

    @computed_once
    def _hash(self) -> int:
        return hash(self._meaning)

    @override
    def __hash__(self) -> int:
        return self._hash

    @override
    def __repr__(self) -> str:
        return repr(self.written)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ops, (self.written,)


def _overloads(entry: _Entry) -> list[str]:
    if entry.optional and not entry.name.overloads:
        return []
    return ops_with(entry.name, entry.policy)


def _read(written: object, value: object) -> _Entry:
    name = read_op(written)
    spelled = written if isinstance(written, str) else name.short
    if not isinstance(value, Mapping):
        return _Entry(spelled, name, read_policy(value, f"the policy of {spelled!r}"), False)
    said = cast("Mapping[object, object]", value)
    unknown = [key for key in said if key not in ("policy", "optional")]
    if unknown:
        alike = nearest(unknown[0], ("policy", "optional"))
        raise ValueError(
            f"{spelled!r} has {unknown[0]!r}, which is nothing that an op has: "
            + (f"did you mean {alike[0]!r}?" if alike else "expected 'policy' and 'optional'")
        )
    optional = said.get("optional", False)
    if not isinstance(optional, bool):
        raise ValueError(f"optional of {spelled!r} must be true or false, got {optional!r}")
    return _Entry(spelled, name, read_policy(said.get("policy"), f"the policy of {spelled!r}"), optional)
