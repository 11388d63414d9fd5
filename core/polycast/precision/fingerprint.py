"""The digests by which a search is told from another one: of the model, its inputs and the metric."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .calls import Call
from .digest import Part, Reader, TensorDigests, digest_of

Varying = set[tuple[str, Part]]
"""Parts of a model, of inputs or of a metric that evaluating them changes."""
Digests = dict[str, dict[str, str]]


class Fingerprint:
    """The digests of a model, its inputs and a metric.

    Attributes:
        unknown: what there is no digest of, as text.
    """

    def __init__(self, model: torch.nn.Module, call: Call, metric: Callable[..., Any] | None) -> None:
        self._model, self._call, self._metric = model, call, metric
        self._tensors: TensorDigests = {}
        readers = self._read()
        self.unknown = [f"{what}: {text}" for what, reader in readers.items() for text in reader.unknown]
        self._parts = {what: reader.parts for what, reader in readers.items()}

    def _read(self) -> dict[str, Reader]:
        modules = dict(self._model.named_modules())
        names = {id(module): name for name, module in modules.items()}
        readers = {what: Reader(names, self._tensors) for what in ("model", "inputs", "metric")}
        for name, module in modules.items():
            readers["model"].read_module(f"module {name!r}" if name else "the model itself", module)
        for position, value in enumerate(self._call.args):
            readers["inputs"].read(Part(f"argument {position}", ""), value)
        for name, value in self._call.kwargs.items():
            readers["inputs"].read(Part(f"argument {name!r}", ""), value)
        if self._metric is not None:
            readers["metric"].read_object("metric", self._metric)
        for reader in readers.values():
            reader.read_named()
        return readers

    def varying(self) -> Varying:
        """Return the parts that have changed since this was made, such as a counter of calls."""
        now = self._read()
        return {
            (what, part)
            for what, parts in self._parts.items()
            for part in {**parts, **now[what].parts}
            if parts.get(part) != now[what].parts.get(part)
        }

    def digests(self, without: Varying) -> Digests:
        """Return the digests by module, class, argument or global, without some parts."""
        said: Digests = {}
        for what, parts in self._parts.items():
            owners: dict[str, list[str]] = {}
            for part, digest in parts.items():
                if (what, part) not in without:
                    owners.setdefault(part.owner, []).append(f"{part.name} {digest}")
            said[what] = {owner: short(digest_of(*sorted(each))) for owner, each in owners.items()}
        return said


def short(digest: bytes) -> str:
    """Return a digest as it is written."""
    return digest.hex()[:16]


def of_table(table: Iterable[tuple[str, object]]) -> str:
    """Return the digest of a table of texts."""
    return short(digest_of(*(f"{key} {value}" for key, value in sorted(table))))


def of_function(function: Callable[..., Any]) -> str:
    """Return a function's name, and a digest of its code where it has some."""
    while isinstance(function, functools.partial):
        function = function.func
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} {short(Reader({}, {}).of_code(code))}"
