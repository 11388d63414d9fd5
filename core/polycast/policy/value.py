"""``Policy``: which ops and modules run in which precision, as a value that can be kept, compared and saved."""

import difflib
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from typing_extensions import Self, final

from ..torch_internals.names import autocast_supported_devices
from . import files
from .cast_policy import CastPolicy
from .computed_once import computed_once
from .modules import ModuleRule, read_rules
from .names import nearest
from .ops import Ops
from .recipes import Recipe

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@final
class Policy:
    """Which ops and modules run in which precision: an immutable, hashable value.

    Names are what people say: ``"softmax"`` and ``"aten::softmax"`` mean every overload of the op that can have the
    policy (in-place and ``out=`` ones are left alone), ``"softmax.int"`` means one of them, ``"sum.default"`` the one
    without a name. A name with an overload goes before one without. Names keep the spelling that they were given, and
    are compared, looked up and put together by what they mean: a policy for ``"softmax"`` equals one for
    ``"aten::softmax"``.

    ``a | b`` is both, key by key, and `b` wins: also where the keys are spelled in two ways, where one of them is for
    an overload that the other includes, and over what `a` has for single devices. Of `modules` the last rule that
    matches decides, so those of `b` come last.

    Args:
        ops: policies by op. A name as above, or the op itself (``torch.ops.aten.mm``); a :class:`CastPolicy` or its
            value as text, or ``{"policy": "fp32", "optional": True}`` for an op that the running torch may lack.
        modules: rules by module. A key is a glob over the names of ``model.named_modules()``, or ``"class:"`` and a
            class's qualified name; a rule is ``"fp32"``, ``"off"``, a fast dtype such as ``"float16"``, policies by op,
            or a recipe such as ``"int8"`` (``"none"``: the fast dtype). They are for :func:`apply_policy`: a region
            refuses a policy that has any.
        devices: what holds on one device only, by device type; it goes before what is for all.
        name: a name for people.

    Attributes:
        ops, modules, devices, name: as given, and read-only. `modules` has dtypes by their names.

    Raises:
        ValueError: an op that this torch lacks, with the nearest names; an op that cannot have its policy; a rule, a
            device or a policy that is none.

    Example:
        >>> from polycast import CastPolicy, Policy
        >>> policy = Policy(ops={"softmax": "fp32", "aten::mm": CastPolicy.PASSTHROUGH})
        >>> policy | Policy({"aten::softmax": "promote"}, name="careful")
        Policy(ops={'aten::mm': 'passthrough', 'aten::softmax': 'promote'}, name='careful')
    """

    ops: Ops
    modules: Mapping[str, ModuleRule]
    devices: Mapping[str, "Policy"]
    name: str

    def __init__(
        self,
        ops: Mapping[Any, CastPolicy | str | Mapping[str, object]] = _NOTHING,
        modules: Mapping[str, Any] = _NOTHING,
        devices: Mapping[str, "Policy"] = _NOTHING,
        name: str = "",
    ) -> None:
        try:
            if not isinstance(name, str):
                raise ValueError(f"name must be a str, got {name!r}")
            vars(self).update(ops=Ops(ops), modules=read_rules(modules), devices=_read_devices(devices), name=name)
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Policy cannot be changed: make another one, such as policy | Policy({name}=...)")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Policy cannot be changed")

    @classmethod
    def of(cls, policy: "PolicyLike") -> "Policy":
        """Return the policy that is given as one, as a mapping of ops, or as the path of a policy file.

        Raises:
            OSError: the file cannot be read.
            ValueError: as :class:`Policy` and :meth:`load`.
        """
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, (str, os.PathLike)):
            return cls.load(policy)
        return cls(policy)

    @classmethod
    def load(cls, path: files.PolicyPath) -> "Policy":
        """Read a policy file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a policy file (not UTF-8, not TOML, unknown keys), is of a newer schema, or says what
                :class:`Policy` refuses.
        """
        try:
            return _of_table(files.read(path))
        except ValueError as error:
            reason = str(error).removeprefix("policy: ")
            raise ValueError(f"policy file {os.fspath(path)!r}: {reason}") from error

    def save(self, path: files.PolicyPath) -> None:
        """Write a policy file, whole or not at all. What is loaded from it and saved again is the same text.

        Raises:
            OSError: it cannot be written.
        """
        files.write(path, self.text())

    def text(self) -> str:
        """Return what :meth:`save` writes."""
        return files.text_of(self._table())

    def for_device(self, device_type: str) -> "Policy":
        """Return what holds on one device: a policy without `devices`."""
        if not self.devices:
            return self
        part = self._on.get(device_type)
        if part is None:
            own = self.devices.get(device_type, Policy())
            modules = _last(self.modules, own.modules)
            part = self._on[device_type] = _made(self.ops | own.ops, modules, _NOTHING, self.name or own.name)
        return part

    @computed_once
    def has_module_rules(self) -> bool:
        """Whether it has rules for modules, on any device."""
        return any(part.modules for part in (self, *self.devices.values()))

    @computed_once
    def _on(self) -> dict[str, "Policy"]:
        return {}

    @computed_once
    def derived(self) -> dict[Any, Any]:
        """What others have made of it, each under a key that has its type."""
        return {}

    def __or__(self, other: object) -> "Policy":
        if not isinstance(other, Policy):
            return NotImplemented
        devices: dict[str, Policy] = dict(other.devices)
        for device_type, part in self.devices.items():
            # It goes before the general part, so what is to win over it has to be said there once more.
            winner = _made(
                other.ops.of_same_ops(part.ops), other.modules if part.modules else _NOTHING, _NOTHING, part.name
            )
            devices[device_type] = part | winner | other.devices.get(device_type, Policy())
        return _made(
            self.ops | other.ops, _last(self.modules, other.modules), MappingProxyType(devices), other.name or self.name
        )

    def diff(self, other: "Policy") -> list[str]:
        """Return what has to change for this policy to be `other`, as lines: ``-`` before what goes, ``+`` what comes.

        Example:
            >>> from polycast import Policy
            >>> before, after = Policy({"softmax": "fp32", "mm": "fp32"}), Policy({"softmax": "promote", "mm": "fp32"})
            >>> for line in before.diff(after):
            ...     print(line)
            - ops.softmax = 'fp32'
            + ops.softmax = 'promote'

        Raises:
            TypeError: `other` is no Policy.
        """
        if not isinstance(other, Policy):
            raise TypeError(f"other must be a polycast.Policy, got {type(other).__name__}")
        changes = list(difflib.unified_diff(list(_lines(self)), list(_lines(other)), n=0, lineterm=""))
        return [f"{line[0]} {line[1:]}" for line in changes[2:] if not line.startswith("@@")]

    @computed_once
    def _meaning(self) -> tuple[object, ...]:
        return self.ops, tuple(self.modules.items()), frozenset(self.devices.items()), self.name

    def __eq__(self, other: object) -> bool:
        return self._meaning == other._meaning if isinstance(other, Policy) else NotImplemented

    @computed_once
    def _hash(self) -> int:
        return hash(self._meaning)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        said = self._table()
        if "devices" in said:
            said["devices"] = dict(self.devices)
        order = [key for key in ("ops", "modules", "devices", "name") if key in said]
        return f"Policy({', '.join(f'{key}={said[key]!r}' for key in order)})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_table, (self._table(),)

    def _table(self) -> dict[str, Any]:
        """Return what it is made of, as a file has it."""
        said: dict[str, Any] = {"name": self.name} if self.name else {}
        if self.ops:
            said["ops"] = self.ops.written
        if self.modules:
            said["modules"] = {
                key: rule.written if isinstance(rule, (Ops, Recipe)) else rule for key, rule in self.modules.items()
            }
        if self.devices:
            said["devices"] = {device_type: policy._table() for device_type, policy in self.devices.items()}
        return said


PolicyLike: TypeAlias = Policy | Mapping[Any, Any] | str | os.PathLike[str]
"""What every ``policy=`` takes: a policy, policies by op, or the path of a policy file."""


def _made(ops: Ops, modules: Mapping[str, ModuleRule], devices: Mapping[str, Policy], name: str) -> Policy:
    """Return a policy of parts that are checked."""
    policy = object.__new__(Policy)
    vars(policy).update(ops=ops, modules=modules, devices=devices, name=name)
    return policy


def _last(modules: Mapping[str, ModuleRule], others: Mapping[str, ModuleRule]) -> Mapping[str, ModuleRule]:
    """Return the rules of both, the others last."""
    first = {key: rule for key, rule in modules.items() if key not in others}
    return MappingProxyType({**first, **others})


def _of_table(said: Mapping[str, Any]) -> Policy:
    devices: dict[str, Policy] = {}
    for device_type, part in said.get("devices", {}).items():
        where = f"devices.{device_type}."
        if not isinstance(part, Mapping):
            raise ValueError(f"{where[:-1]} must be a table, got {part!r}")
        files.check_keys(part, ("name", "ops", "modules"), where)
        files.check_tables(part, where)
        try:
            devices[device_type] = _of_table(part)
        except ValueError as error:
            raise ValueError(f"{where[:-1]}: {str(error).removeprefix('policy: ')}") from None
    return Policy(said.get("ops", {}), said.get("modules", {}), devices, said.get("name", ""))


def _read_devices(devices: object) -> Mapping[str, Policy]:
    if not isinstance(devices, Mapping):
        raise ValueError(f"devices must map device types to Policy, got {type(devices).__name__}")
    for device_type, policy in devices.items():
        where = f"devices[{device_type!r}]"
        known = autocast_supported_devices()
        if device_type not in known:
            alike = nearest(device_type, known)
            raise ValueError(
                f"{where}: not a device type that torch's autocast knows: "
                + (f"did you mean {alike[0]!r}?" if alike else f"expected one of {', '.join(known)}.")
                + " A device of another library has its name once that is imported."
            )
        if not isinstance(policy, Policy):
            raise ValueError(f"{where} must be a Policy, got {type(policy).__name__}")
        if policy.devices:
            raise ValueError(f"{where} is a policy for one device, and cannot have devices of its own")
    return MappingProxyType(dict(devices))


def _lines(policy: Policy, where: str = "") -> Iterator[str]:
    """Return what a policy says, a line for each thing: the same for equal ones. Order matters in `modules` only."""
    if policy.name:
        yield f"{where}name = {policy.name!r}"
    for op, said in policy.ops.by_meaning.items():
        yield f"{where}ops.{op} = {said!r}"
    for key, rule in policy.modules.items():
        as_said: object = rule.by_meaning if isinstance(rule, Ops) else rule
        yield f"{where}modules.{key} = {as_said.written if isinstance(as_said, Recipe) else as_said!r}"
    for device_type, part in sorted(policy.devices.items()):
        yield from [*_lines(part, f"{where}devices.{device_type}.")] or [f"{where}devices.{device_type} = nothing"]
