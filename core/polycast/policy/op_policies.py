"""`OpPolicies`: policies by op, resolved to the overloads of the running torch; `ModulePolicies`: those of a module."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from typing_extensions import override

from ..common.cached_property import cached_property
from .cast_policy import CastPolicy
from .names import OpName, dtype_name, hint, nearest_as_text, ops_with, read_dtype, read_op, read_policy

OUTPUT = "output"
"""The key beside the ops of a module for the dtype of what it returns."""

Written = str | dict[str, str | bool]
"""A policy as in a file: a str, or a table with ``policy`` and ``optional``."""


class _Entry(NamedTuple):
    written: str
    name: OpName
    policy: CastPolicy
    optional: bool


class OpPolicies(Mapping[str, CastPolicy]):
    """An immutable, hashable mapping from ops to policies. Keys keep their spelling; any spelling finds them.

    A name with an overload takes precedence over one without. The running torch may lack an ``optional`` op.
    """

    _besides: Mapping[str, str] = MappingProxyType({})
    """The items that are not about ops."""

    def __init__(self, ops: object = MappingProxyType({})) -> None:
        """Parse a mapping from names to policies.

        Raises:
            ValueError: a name or policy is not valid; the message has a sentence for each.
        """
        if isinstance(ops, OpPolicies) and not ops._besides:
            self._set(ops._entries)
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
            else:
                entries[entry.name.key] = entry
        if problems:
            raise ValueError("; ".join(problems))
        self._set(entries)

    def _set(self, entries: dict[str, _Entry]) -> None:
        self._entries = entries
        self._missing = [entry for entry in entries.values() if not entry.name.overloads]
        by_precedence = sorted(entries.values(), key=lambda entry: entry.name.overload is not None)
        self._resolved = {overload: entry.policy for entry in by_precedence for overload in _overloads(entry)}
        self._items = frozenset(self._resolved.items())

    def _find_missing(self) -> None:
        if any(entry.name.overloads for entry in self._missing):  # a library was loaded since
            self._set(self._entries)

    @property
    def resolved(self) -> Mapping[str, CastPolicy]:
        """The policies by dispatcher name of an overload."""
        self._find_missing()
        return MappingProxyType(self._resolved)

    @property
    def resolved_items(self) -> frozenset[tuple[str, CastPolicy]]:
        """The items of `resolved`; the same object until a library is loaded that has a missing op."""
        if self._missing:
            self._find_missing()
        return self._items

    def __or__(self, other: object) -> "OpPolicies":
        """Merge two mappings; `other` takes precedence, as the policy of an inner region does."""
        if not isinstance(other, OpPolicies):
            return NotImplemented
        if not (self._entries and other._entries):
            return self if self._entries else other
        entries: dict[str, _Entry] = {}
        for key, entry in self._entries.items():
            winner = other._entries.get(key) or other._entries.get(entry.name.qualified)
            if winner is None:
                entries[key] = entry
                continue
            # The overloads that cannot have the winner's policy keep theirs.
            for overload in sorted(set(_overloads(entry)) - set(_overloads(winner))):
                name = OpName.of_overload(overload)
                if name.key not in self._entries or name.key == key:
                    entries[name.key] = _Entry(name.short, name, entry.policy, entry.optional)
        both = OpPolicies()
        both._set({**entries, **other._entries})
        return both

    def restricted_to(self, other: "OpPolicies") -> "OpPolicies":
        """Return the entries for ops that `other` names too, in any overload."""
        known = {entry.name.qualified for entry in other._entries.values()}
        part = OpPolicies()
        part._set({key: entry for key, entry in self._entries.items() if entry.name.qualified in known})
        return part

    @override
    def __getitem__(self, op: object) -> CastPolicy:
        try:
            return self._entries[read_op(op).key].policy
        except (TypeError, ValueError):
            raise KeyError(op) from None

    @override
    def __iter__(self) -> Iterator[str]:
        return iter((*(entry.written for entry in self._entries.values()), *self._besides))

    @override
    def __len__(self) -> int:
        return len(self._entries) + len(self._besides)

    @property
    def written(self) -> dict[str, Written]:
        """The mapping as in a policy file."""
        written: dict[str, Written] = {
            entry.written: {"policy": entry.policy.value, "optional": True} if entry.optional else entry.policy.value
            for entry in self._entries.values()
        }
        return {**written, **self._besides}

    @cached_property
    def _identity(self) -> frozenset[object]:
        entries = ((key, entry.policy, entry.optional) for key, entry in self._entries.items())
        return frozenset((*entries, *self._besides.items()))

    @property
    def normalized(self) -> dict[str, Written]:
        """As `written`, with the shortest name of each op, sorted: equal for equal mappings."""
        written = self.written
        ops = {entry.name.short: written[entry.written] for _, entry in sorted(self._entries.items())}
        return {**ops, **self._besides}

    @override
    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, OpPolicies) else NotImplemented

    @override
    def __hash__(self) -> int:
        return hash(self._identity)  # which a frozenset keeps

    @override
    def __repr__(self) -> str:
        return repr(self.written)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.written,)


class ModulePolicies(OpPolicies):
    """Policies by op for a module and, under the key ``"output"``, the dtype of what the module returns."""

    def __init__(self, rule: Mapping[Any, Any]) -> None:
        """Parse a mapping.

        Raises:
            ValueError: a name, a policy or the dtype is not valid.
        """
        if OUTPUT in rule:
            self._besides = MappingProxyType({OUTPUT: _read_output(rule[OUTPUT])})
            rule = {op: policy for op, policy in rule.items() if op != OUTPUT}
        super().__init__(rule)

    @property
    def output(self) -> str | None:
        """The name of the dtype of what the module returns; None if that is not cast."""
        return self._besides.get(OUTPUT)

    @override
    def __getitem__(self, op: object) -> Any:
        return self.output if op == OUTPUT and self.output else super().__getitem__(op)


def _read_output(dtype: object) -> str:
    with suppress(ValueError):
        if (found := read_dtype(dtype)).is_floating_point:
            return dtype_name(found)
    near = nearest_as_text(dtype, ("float32", "float16", "bfloat16"))
    raise ValueError(f"{OUTPUT!r} must be a floating-point dtype such as 'float32', got {dtype!r}{near}")


def _overloads(entry: _Entry) -> list[str]:
    if entry.optional and not entry.name.overloads:
        return []
    return ops_with(entry.name, entry.policy)


def _read(written: object, value: object) -> _Entry:
    if written == OUTPUT:
        raise ValueError(
            f"{OUTPUT!r} is not an op, but a key of rules for modules: for a model write "
            f"polycast.apply_policy(model, Policy(modules={{'': {{{OUTPUT!r}: {value!r}}}}}))"
        )
    name = read_op(written)
    spelled = written if isinstance(written, str) else name.short
    if not isinstance(value, Mapping):
        return _Entry(spelled, name, read_policy(value, f"the policy of {spelled!r}"), False)
    table = cast("Mapping[object, object]", value)
    unknown = [key for key in table if key not in ("policy", "optional")]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is not a key of the policy of {spelled!r}: {hint(unknown[0], ('policy', 'optional'))}"
        )
    optional = table.get("optional", False)
    if not isinstance(optional, bool):
        raise ValueError(f"optional of {spelled!r} must be true or false, got {optional!r}")
    return _Entry(spelled, name, read_policy(table.get("policy"), f"the policy of {spelled!r}"), optional)
