"""Digests of Python values that are the same in every process.

The digest of an object is that of its pickling state (``__reduce_ex__``); of a function, that of its code, defaults and
closure; of a class, that of its name, and the class itself is added to the references. Addresses, hashes, the order of
sets and dicts, threads, locks and loggers do not count.
"""

import contextlib
import copyreg
import ctypes
import functools
import hashlib
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..torch_internals.dispatcher import OpOverload, OpOverloadPacket
from .code_references import References, cell_contents, origin
from .hooks import COMPILED_CALL

Pieces = list[tuple[str, Any]]
TensorDigests = dict[int, tuple[torch.Tensor, tuple[int, int], bytes]]
"""By the id of a tensor: the tensor, its version and address, and its digest."""

_LITERALS = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_KNOWN_BY_TEXT = (torch.layout, torch.qscheme, OpOverload, OpOverloadPacket)
_WITHOUT_VALUE = ("_thread", "threading", "concurrent", "asyncio", "multiprocessing", "logging")
_MODULE_WITHOUT = frozenset(vars(torch.nn.Module())) | {COMPILED_CALL}
CALLABLES = (
    *(types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper),
    *(staticmethod, classmethod, property),
)
"""The types that :func:`pieces_of_callable` takes apart."""


def hash_of(*parts: str | bytes) -> bytes:
    """Return a hash of texts, in order."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


def short(digest: bytes) -> str:
    """Return a digest as text."""
    return digest.hex()[:16]


class Digester:
    """Computes digests of values.

    Attributes:
        failed: the names of the classes of values without a digest, in the last value.
    """

    def __init__(self, modules: Mapping[int, str], tensors: TensorDigests, references: References) -> None:
        """Make a digester.

        Args:
            modules: by id, the names of the modules whose names are their digests.
            tensors: digests of tensors, used as long as the tensors are unchanged, and added to.
            references: receives the classes and globals that the values refer to.
        """
        self.failed: list[str] = []
        self._modules, self._tensors, self._references = modules, tensors, references
        self._memo: dict[int, tuple[Any, bytes]] = {}
        self._open: dict[int, int] = {}

    def digest(self, value: Any) -> str:
        """Return the digest of a value."""
        self._open, self.failed = {}, []
        try:
            return short(self._of(value))
        except Exception:  # of the value's own code, or nested too deeply
            return short(self._fail(value))

    def _of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _LITERALS:
            return hash_of(kind.__name__, hex(value) if kind is int else repr(value))
        if id(value) in self._memo:
            return self._memo[id(value)][1]
        if id(value) in self._open:  # a cycle
            return hash_of("around", str(len(self._open) - self._open[id(value)]))
        self._open[id(value)] = len(self._open)
        digest = self._content(value, kind)
        del self._open[id(value)]
        self._memo[id(value)] = value, digest
        return digest

    def _content(self, value: Any, kind: type) -> bytes:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.nn.Module):
            if id(value) in self._modules:
                return hash_of("module", self._modules[id(value)])
            return self._of_pieces("module", pieces_of_module(value))
        if isinstance(value, type):
            return hash_of("class", self._references.add_class(value))
        if isinstance(value, CALLABLES):
            if isinstance(value, types.FunctionType):
                self._references.add_globals_of(value)
            return self._of_pieces("callable", pieces_of_callable(value))
        if isinstance(value, types.CodeType):
            return self.of_code(value)
        if isinstance(value, types.ModuleType):
            self._references.add_package(value.__name__)
            return hash_of("import", value.__name__)
        if isinstance(value, torch.jit.ScriptFunction):
            return hash_of("script", str(value.graph))
        if isinstance(value, _KNOWN_BY_TEXT):
            return hash_of(kind.__name__, str(value))
        if kind.__module__.partition(".")[0] in _WITHOUT_VALUE:
            return hash_of("without value", kind.__qualname__)
        if isinstance(value, weakref.ReferenceType):
            return hash_of("weak", self._of(value()))
        if kind in (dict, types.MappingProxyType):
            return hash_of("dict", *sorted(hash_of(self._of(key), self._of(item)) for key, item in value.items()))
        if isinstance(value, (set, frozenset)):
            return hash_of("set", self._of(kind), *sorted(map(self._of, value)))
        if kind in (list, tuple):
            return hash_of(kind.__name__, *map(self._of, value))
        return self._object(value, kind)

    def _object(self, value: Any, kind: type) -> bytes:
        """Return the digest of an object by its pickling state, or its attributes if it cannot be pickled."""
        reduce = copyreg.dispatch_table.get(kind)
        try:
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:
            attributes = attributes_of(value)
            return (
                self._fail(value) if attributes is None else self._of_pieces("object", [("class", kind), *attributes])
            )
        if isinstance(reduced, str):
            return hash_of("global", str(getattr(value, "__module__", kind.__module__)), reduced)
        state = (list(part) if isinstance(part, Iterator) else part for part in reduced)
        return hash_of("object", self._of(kind), *map(self._of, state))

    def _of_pieces(self, what: str, pieces: Pieces) -> bytes:
        return hash_of(what, *(part for name, piece in pieces for part in (name, self._of(piece))))

    def _fail(self, value: Any) -> bytes:
        kind = type(value)
        self.failed.append(f"{kind.__module__}.{kind.__qualname__}")
        return hash_of("unknown", kind.__qualname__)

    def of_code(self, code: types.CodeType) -> bytes:
        """Return the digest of code, without its file and lines."""
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        exceptions = getattr(code, "co_exceptiontable", b"")
        return hash_of(code.co_code, exceptions, repr(names), *(self._of(each) for each in code.co_consts))

    def _tensor(self, tensor: torch.Tensor) -> bytes:
        try:
            state = (-1 if tensor.is_inference() else tensor._version, tensor.data_ptr())
        except Exception:  # a subclass, or without storage
            state = (-1, 0)
        known = self._tensors.get(id(tensor))
        if known is not None and known[1] == state and state[0] >= 0:
            return known[2]
        try:
            digest = self._content_of_tensor(tensor)
        except Exception:  # an unsupported layout or subclass
            return self._fail(tensor)
        self._tensors[id(tensor)] = tensor, state, digest
        return digest

    def _content_of_tensor(self, tensor: torch.Tensor) -> bytes:
        header = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {tensor.device.type}"
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, context = flatten()
            inner = [self._of(getattr(tensor, name)) for name in names]
            return hash_of("tensor", header, self._of(type(tensor)), *inner, self._of(context))
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            return hash_of("tensor", header, self._of(tensor.__reduce_ex__(4)))  # type: ignore[no-untyped-call]
        if tensor.is_quantized:
            return hash_of("tensor", header, self._of(tensor.dequantize()), self._of(tensor.int_repr()))
        if tensor.is_meta or not tensor.numel():
            return hash_of("tensor", header)
        host = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        content = hashlib.sha256((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).digest()
        return hash_of("tensor", header, content)


def pieces_of_module(module: torch.nn.Module) -> Pieces:
    """Return the state of a module, with the modules in it as values."""
    if isinstance(module, torch.jit.ScriptModule):
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        return [("code", module._c.dump_to_str(True, True, False)), *tensors]
    is_compiled = type(module).__module__.startswith("torch._dynamo")  # its attributes are those of compilation
    attributes = {} if is_compiled else {k: v for k, v in vars(module).items() if k not in _MODULE_WITHOUT}
    return [
        ("class", type(module)),
        ("training", module.training),
        *(module._parameters | module._buffers | dict(sorted(attributes.items()))).items(),
        ("modules", list(module._modules.items())),
        ("hooks", _hooks(module, "_forward_pre_hooks") + _hooks(module, "_forward_hooks")),
    ]


def _hooks(module: torch.nn.Module, which: str) -> list[Any]:
    with_kwargs = getattr(module, f"{which}_with_kwargs", ())
    return [(hook, number in with_kwargs) for number, hook in getattr(module, which).items()]


def pieces_of_callable(value: Any) -> Pieces:
    """Return the parts of one of the :data:`CALLABLES`."""
    if isinstance(value, types.FunctionType):
        is_known = origin(str(value.__globals__.get("__name__"))) == "known"
        code = f"{value.__module__}.{value.__qualname__}" if is_known else value.__code__
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [
            ("code", code),
            ("defaults", (value.__defaults__, value.__kwdefaults__)),
            *((f"variable {name}", cell_contents(cell)) for name, cell in cells),
            *sorted(vars(value).items()),
        ]
    if isinstance(value, types.MethodType):
        of = value.__self__
        attributes = None if isinstance(of, (torch.nn.Module, type)) else attributes_of(of)
        named = [("self", of)] if not attributes else [(f"self.{name}", each) for name, each in attributes]
        return [("function", value.__func__), ("class", type(of)), *named]
    if isinstance(value, functools.partial):
        keywords = [(name, value.keywords[name]) for name in sorted(value.keywords)]
        return [("function", value.func), *((f"argument {n}", each) for n, each in enumerate(value.args)), *keywords]
    if isinstance(value, property):
        return [("get", value.fget), ("set", value.fset)]
    return [("function", value.__wrapped__)]


def attributes_of(value: Any) -> Pieces | None:
    """Return the attributes of an object, sorted by name, or None if it cannot have attributes."""
    own = getattr(value, "__dict__", None)
    attributes = {str(name): each for name, each in own.items()} if isinstance(own, dict) else None
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(kind):
                attributes = {} if attributes is None else attributes
                with contextlib.suppress(AttributeError):  # unset
                    attributes[name] = slot.__get__(value)
    return None if attributes is None else sorted(attributes.items(), key=lambda item: item[0])
