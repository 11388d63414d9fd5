"""Identify a search by digests of the model, its data, the metric and the loss."""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .calls import Calls
from .code_references import References, origin
from .digest import (
    CALLABLES,
    Digester,
    TensorDigests,
    attributes_of,
    hash_of,
    pieces_of_callable,
    pieces_of_module,
    short,
)


class Part(NamedTuple):
    """A part of a value that has a digest of its own.

    Attributes:
        owner: the module, argument, class or global, as text.
        name: the part of the owner, such as an attribute.
    """

    owner: str
    name: str


Varying = set[tuple[str, Part]]
"""Parts of the model, the inputs, the metric or the loss that evaluations change."""

_CLASS_WITHOUT = {
    *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__slots__", "__firstlineno__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__static_attributes__"),
    *("__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__", "__match_args__"),
    *("__parameters__", "__orig_bases__"),
}
_MAX_DEPTH = 4


class Fingerprint:
    """The digests of a model, its inputs, a metric and a loss.

    Attributes:
        unknown: the values without a digest, as text.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        calls: Calls,
        metric: Callable[..., Any] | None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._calls = model, calls
        self._functions = {"metric": metric, "loss": loss}
        self._tensors: TensorDigests = {}
        self._parts = self._read()
        self.unknown = [f"{what}: {text}" for what, parts in self._parts.items() for text in parts.unknown]

    def _read(self) -> dict[str, "_Parts"]:
        modules = dict(self._model.named_modules())
        names = {id(module): name for name, module in modules.items()}
        model, inputs = (_Parts(names, self._tensors) for _ in range(2))
        for name, module in modules.items():
            model.add_pieces(f"module {name!r}" if name else "the model itself", pieces_of_module(module))
        for number, call in enumerate(self._calls):
            batch = f"batch {number}, " if len(self._calls) > 1 else ""
            for position, value in enumerate(call.args):
                inputs.add(Part(f"{batch}argument {position}", ""), value)
            for name, value in call.kwargs.items():
                inputs.add(Part(f"{batch}argument {name!r}", ""), value)
        parts = {"model": model, "inputs": inputs}
        for what, function in self._functions.items():
            parts[what] = _Parts(names, self._tensors)
            if function is not None:
                parts[what].add_function(function, what, is_in_model=id(function) in names)
        for each in parts.values():
            each.add_references()
        return parts

    def varying(self) -> Varying:
        """Return the parts that have changed since, such as a counter of calls."""
        now = self._read()
        return {
            (what, part)
            for what, parts in self._parts.items()
            for part in {**parts.digests, **now[what].digests}
            if parts.digests.get(part) != now[what].digests.get(part)
        }

    def digests(self, without: Varying) -> dict[str, dict[str, str]]:
        """Return the digests by module, class, argument or global, without some parts."""
        by_owner: dict[str, dict[str, str]] = {}
        for what, parts in self._parts.items():
            owners: dict[str, list[str]] = {}
            for part, digest in parts.digests.items():
                if (what, part) not in without:
                    owners.setdefault(part.owner, []).append(f"{part.name} {digest}")
            by_owner[what] = {owner: short(hash_of(*sorted(each))) for owner, each in owners.items()}
        return by_owner


class _Parts:
    """The digests of the model, the inputs, the metric or the loss, by part."""

    def __init__(self, modules: dict[int, str], tensors: TensorDigests) -> None:
        self.digests: dict[Part, str] = {}
        self.unknown: dict[str, None] = {}
        self._references = References()
        self._digester = Digester(modules, tensors, self._references)

    def add(self, part: Part, value: Any, depth: int = 0) -> None:
        """Add a value. The code and each variable of a function are parts of their own."""
        if depth == _MAX_DEPTH or not isinstance(value, CALLABLES):
            self.digests[part] = self._digester.digest(value)
            for kind in self._digester.failed:
                self.unknown[f"{kind} in {part.owner}" + (f", {part.name}" if part.name else "")] = None
            return
        for name, piece in pieces_of_callable(value):
            self.add(Part(part.owner, f"{part.name}.{name}" if part.name else name), piece, depth + 1)
        if isinstance(value, types.FunctionType):
            self._references.add_globals_of(value)

    def add_pieces(self, owner: str, pieces: Iterable[tuple[str, Any]]) -> None:
        """Add values as parts of an owner."""
        for name, piece in pieces:
            self.add(Part(owner, name), piece)

    def add_function(self, function: Callable[..., Any], what: str, *, is_in_model: bool) -> None:
        """Add a metric or a loss, attribute by attribute if it is an object."""
        attributes = attributes_of(function)
        if isinstance(function, torch.nn.Module) and not is_in_model:
            self.add_pieces(what, pieces_of_module(function))
        elif isinstance(function, (*CALLABLES, type, torch.nn.Module)) or attributes is None:
            self.add(Part(what, ""), function)
        else:
            self.add_pieces(what, [("class", type(function)), *((f"self.{name}", each) for name, each in attributes)])

    def add_references(self) -> None:
        """Add the classes and globals that the values refer to, directly or indirectly."""
        for owner, value in self._references.found:  # grows
            if not isinstance(value, type):
                self.add(Part(owner, ""), value)
                continue
            is_own = origin(value.__module__) == "own"
            for name in sorted(set(vars(value)) - _CLASS_WITHOUT):
                attribute = vars(value)[name]
                if is_own or isinstance(attribute, CALLABLES):
                    self.add(Part(owner, name), attribute)
            self.add(Part(owner, "bases"), value.__bases__)


def hash_of_table(table: Iterable[tuple[str, object]]) -> str:
    """Return the digest of a table of texts."""
    return short(hash_of(*(f"{key} {value}" for key, value in sorted(table))))


def name_of_function(function: Callable[..., Any]) -> str:
    """Return a function's name, with a digest of its code if it has code."""
    while isinstance(function, functools.partial):
        function = function.func
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} {short(Digester({}, {}, References()).of_code(code))}"
