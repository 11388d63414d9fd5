"""`Policy`: the precision of ops and modules, as a value that can be compared, merged and saved."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from typing_extensions import Self, final

from ..common.cached_property import cached_property
from ..common.replaced_file import replaced_file
from ..torch_internals.dispatcher import autocast_supported_devices
from . import files
from .cast_policy import CastPolicy
from .modules import ModuleRule, read_rules
from .names import hint, read_policy
from .op_policies import OpPolicies
from .recipe import Recipe
from .recipe_settings import is_object
from .result import html_table

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@final
class Policy:
    """The precision of ops and modules: an immutable, hashable value.

    ``"softmax"`` and ``"aten::softmax"`` name every overload of the op that can have the policy, except in-place and
    ``out=`` ones; ``"softmax.int"`` names one, ``"sum.default"`` the one without a name. A name with an overload takes
    precedence over one without. The spelling of a name is preserved, but does not matter: a policy for ``"softmax"``
    equals one for ``"aten::softmax"``.

    ``a | b`` merges two policies; `b` takes precedence, over the parts of `a` for single devices too. Of `modules` the
    last rule that matches decides, so those of `b` come last.

    Args:
        ops: policies by op. A key is a name as above or the op itself (``torch.ops.aten.mm``); a value is a
            :class:`CastPolicy` or its name, or ``{"policy": "fp32", "optional": True}`` for an op that the running
            torch may lack.
        modules: rules by module, for :func:`apply_policy`; a region refuses a policy that has any. A key is a glob over
            the names of ``model.named_modules()``, or ``"class:"`` and a class's qualified name. A rule is ``"fp32"``,
            ``"off"``, a fast dtype such as ``"float16"``, a recipe such as ``"int8"`` (``"none"``: the fast dtype), or
            policies by op and, as ``"output"``, the dtype of what the module returns.
        devices: policies for single devices, by device type, which take precedence.
        name: a label.

    Attributes:
        ops, modules, devices, name: as given, and read-only. `modules` has dtypes by name.

    Raises:
        ValueError: this torch lacks an op (the message has the nearest names); an op cannot have its policy; or a rule,
            a device or a policy is not valid.

    Example:
        >>> from polycast import CastPolicy, Policy
        >>> policy = Policy(ops={"softmax": "fp32", "aten::mm": CastPolicy.PASSTHROUGH})
        >>> policy | Policy({"aten::softmax": "promote"}, name="careful")
        Policy(ops={'aten::mm': 'passthrough', 'aten::softmax': 'promote'}, name='careful')
    """

    ops: OpPolicies
    modules: Mapping[str, ModuleRule]
    devices: Mapping[str, "Policy"]
    name: str

    def __init__(
        self,
        ops: Mapping[Any, CastPolicy | str | Mapping[str, object]] = _EMPTY,
        modules: Mapping[str, Any] = _EMPTY,
        devices: Mapping[str, "Policy"] = _EMPTY,
        name: str = "",
    ) -> None:
        try:
            if not isinstance(name, str):
                raise ValueError(f"name must be a str, got {name!r}")
            vars(self).update(
                ops=OpPolicies(ops), modules=read_rules(modules), devices=_read_devices(devices), name=name
            )
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Policy cannot be changed: make another one, such as policy | Policy({name}=...)")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Policy cannot be changed")

    @classmethod
    def of(cls, policy: "PolicyLike") -> "Policy":
        """Return a policy, given as one, as policies by op, or as the path of a policy file.

        Raises:
            OSError: the file cannot be read.
            ValueError: see :class:`Policy` and :meth:`load`.
        """
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, (str, os.PathLike)):
            _refuse_name(policy)
            return cls.load(policy)
        return cls(policy)

    @classmethod
    def load(cls, path: files.PolicyPath) -> "Policy":
        """Read a policy file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a policy file (not UTF-8, not TOML, unknown keys), has a newer schema, or has values
                that :class:`Policy` refuses.
        """
        try:
            return _from_table(files.with_absolute_paths(files.read(path), path))
        except ValueError as error:
            reason = str(error).removeprefix("policy: ")
            raise ValueError(f"policy file {os.fspath(path)!r}: {reason}") from error

    def save(self, path: files.PolicyPath, comments: Iterable[str] = ()) -> None:
        """Write a policy file, atomically. Loading and saving it again gives the same text, but for comments.

        Args:
            path: the file.
            comments: lines at its head.

        Raises:
            OSError: it cannot be written.
            ModuleNotFoundError: the extra ``polycast[files]`` is not installed.
            ValueError: a recipe has a calibration that is in no file.
        """
        text = self.text(path, comments)
        with replaced_file(Path(path)) as complete:
            complete.write_text(text, encoding="utf-8", newline="\n")

    def text(self, path: files.PolicyPath | None = None, comments: Iterable[str] = ()) -> str:
        """Return the text of the policy file that :meth:`save` writes.

        Args:
            path: the file; the paths of calibrations are relative to its folder. None: they are absolute.
            comments: lines at its head.

        Raises:
            ValueError: a recipe has a calibration that is in no file.
        """
        table = self._table()
        text = files.to_text(table if path is None else files.with_relative_paths(table, path))
        head = "".join(f"# {line}\n" for line in comments)
        return f"{head}\n{text}" if head else text

    @classmethod
    def of_text(cls, text: str) -> "Policy":
        """Return the policy with a :meth:`text`. Relative paths in it begin at the current folder.

        Raises:
            ValueError: as :meth:`load`.
        """
        return _from_table(files.of_text(text))

    def without_modules(self) -> "Policy":
        """Return the policy without its rules for modules, as regions take it."""
        return Policy(self.ops, devices={device: Policy(part.ops) for device, part in self.devices.items()})

    def only_modules(self) -> "Policy":
        """Return the rules for modules alone."""
        devices = {device: Policy(modules=part.modules) for device, part in self.devices.items()}
        return Policy(modules=self.modules, devices=devices)

    def for_device(self, device_type: str) -> "Policy":
        """Return the policy for one device, which has no `devices`."""
        if not self.devices:
            return self
        part = self._by_device.get(device_type)
        if part is None:
            own = self.devices.get(device_type, Policy())
            modules = _append_rules(self.modules, own.modules)
            part = self._by_device[device_type] = _assemble(self.ops | own.ops, modules, _EMPTY, self.name or own.name)
        return part

    @cached_property
    def has_module_rules(self) -> bool:
        """Whether it has rules for modules, for any device."""
        return any(part.modules for part in (self, *self.devices.values()))

    @cached_property
    def _by_device(self) -> dict[str, "Policy"]:
        return {}

    def __or__(self, other: object) -> "Policy":
        if not isinstance(other, Policy):
            return NotImplemented
        devices: dict[str, Policy] = dict(other.devices)
        for device_type, part in self.devices.items():
            # A device's part precedes the general part of `other`, so what `other` changes is repeated in it.
            winner = _assemble(
                other.ops.restricted_to(part.ops), other.modules if part.modules else _EMPTY, _EMPTY, part.name
            )
            devices[device_type] = part | winner | other.devices.get(device_type, Policy())
        return _assemble(
            self.ops | other.ops,
            _append_rules(self.modules, other.modules),
            MappingProxyType(devices),
            other.name or self.name,
        )

    def diff(self, other: "Policy") -> list[str]:
        """Return the lines by which `other` differs: ``-`` before a line that only this policy has, ``+`` the others.

        Example:
            >>> from polycast import Policy
            >>> before, after = Policy({"softmax": "fp32", "mm": "fp32"}), Policy({"softmax": "promote", "mm": "fp32"})
            >>> for line in before.diff(after):
            ...     print(line)
            - ops.softmax = 'fp32'
            + ops.softmax = 'promote'

        Raises:
            TypeError: `other` is not a Policy.
        """
        if not isinstance(other, Policy):
            raise TypeError(f"other must be a polycast.Policy, got {type(other).__name__}")
        changes = list(difflib.unified_diff(list(_lines(self)), list(_lines(other)), n=0, lineterm=""))
        return [f"{line[0]} {line[1:]}" for line in changes[2:] if not line.startswith("@@")]

    @cached_property
    def _identity(self) -> tuple[object, ...]:
        return self.ops, tuple(self.modules.items()), frozenset(self.devices.items()), self.name

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        modules = {key: _shown(rule) for key, rule in self.modules.items()}
        arguments = {"ops": self.ops.written, "modules": modules, "devices": dict(self.devices), "name": self.name}
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in arguments.items() if value)})"

    def _repr_html_(self) -> str:
        lines = (line.partition(" = ") for line in _lines(self))
        return html_table(("for", "policy"), ((name, value) for name, _, value in lines), "Policy")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        modules = {key: rule.written if isinstance(rule, OpPolicies) else rule for key, rule in self.modules.items()}
        return Policy, (self.ops.written, modules, dict(self.devices), self.name)

    def _table(self) -> dict[str, Any]:
        """Return the tables of its policy file."""
        table: dict[str, Any] = {"name": self.name} if self.name else {}
        if self.ops:
            table["ops"] = self.ops.written
        if self.modules:
            table["modules"] = {
                key: rule.written if isinstance(rule, (OpPolicies, Recipe)) else rule
                for key, rule in self.modules.items()
            }
        if self.devices:
            table["devices"] = {device_type: policy._table() for device_type, policy in self.devices.items()}
        return table


def _refuse_name(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for the name of a cast policy or dtype in place of a policy."""
    try:
        policy = read_policy(path, "policy")
    except ValueError:
        return
    if not os.path.exists(path):
        raise ValueError(
            f"policy={path!r} is the name of a cast policy, not a policy file. A policy names ops, as in "
            f"{{'softmax': {policy.value!r}}}. For a region in float32 write enabled=False"
        )


PolicyLike: TypeAlias = Policy | Mapping[Any, Any] | str | os.PathLike[str]
"""The type of every ``policy=`` argument: a policy, policies by op, or the path of a policy file."""


def _assemble(ops: OpPolicies, modules: Mapping[str, ModuleRule], devices: Mapping[str, Policy], name: str) -> Policy:
    """Return a policy of validated parts."""
    policy = object.__new__(Policy)
    vars(policy).update(ops=ops, modules=modules, devices=devices, name=name)
    return policy


def _append_rules(modules: Mapping[str, ModuleRule], others: Mapping[str, ModuleRule]) -> Mapping[str, ModuleRule]:
    """Return the rules of both mappings, the others last."""
    first = {key: rule for key, rule in modules.items() if key not in others}
    return MappingProxyType({**first, **others})


def _from_table(table: Mapping[str, Any]) -> Policy:
    devices: dict[str, Policy] = {}
    for device_type, part in table.get("devices", {}).items():
        where = f"devices.{device_type}."
        if not isinstance(part, Mapping):
            raise ValueError(f"{where[:-1]} must be a table, got {part!r}")
        files.check_keys(part, ("name", "ops", "modules"), where)
        files.check_tables(part, where)
        try:
            devices[device_type] = _from_table(part)
        except ValueError as error:
            raise ValueError(f"{where[:-1]}: {str(error).removeprefix('policy: ')}") from None
    return Policy(table.get("ops", {}), table.get("modules", {}), devices, table.get("name", ""))


def _read_devices(devices: object) -> Mapping[str, Policy]:
    if not isinstance(devices, Mapping):
        raise ValueError(f"devices must map device types to Policy, got {type(devices).__name__}")
    for device_type, policy in devices.items():
        where = f"devices[{device_type!r}]"
        known = autocast_supported_devices()
        if device_type not in known:
            raise ValueError(
                f"{where}: not a device type that torch's autocast knows: {hint(device_type, known)} "
                "To use a device of another library, import the library first."
            )
        if not isinstance(policy, Policy):
            raise ValueError(f"{where} must be a Policy, got {type(policy).__name__}")
        if policy.devices:
            raise ValueError(f"{where} is a policy for one device, and cannot have devices of its own")
    return MappingProxyType(dict(devices))


def _shown(rule: object) -> object:
    """Return a rule as in a policy file, if that can have it."""
    if isinstance(rule, Recipe):
        return rule if any(map(is_object, rule.settings.values())) else rule.written
    return rule.written if isinstance(rule, OpPolicies) else rule


def _lines(policy: Policy, where: str = "") -> Iterator[str]:
    """Yield a policy as lines, the same for equal policies. Order matters in `modules` only."""
    if policy.name:
        yield f"{where}name = {policy.name!r}"
    for op, written in policy.ops.normalized.items():
        yield f"{where}ops.{op} = {written!r}"
    for key, rule in policy.modules.items():
        value: object = rule.normalized if isinstance(rule, OpPolicies) else rule
        yield f"{where}modules.{key} = {_shown(value)!r}"
    for device_type, part in sorted(policy.devices.items()):
        yield from [*_lines(part, f"{where}devices.{device_type}.")] or [f"{where}devices.{device_type} = nothing"]
