"""Digests of Python values: of all that they are made of, and the same in every process.

The digest of an object is of its attributes, that of a function of its code, its defaults and the variables of its
closure. The classes and globals that code names are read beside, each once. Code of Python, torch and polycast is known
by its name, as the versions of these are compared; of other installed packages the version and the code are read, but
not the globals.

Left out are addresses, hashes, the order of sets and dicts, and what says nothing of results: threads, locks, loggers.
"""

import contextlib
import copyreg
import ctypes
import enum
import functools
import hashlib
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..torch_internals.dispatcher import OpOverload, OpOverloadPacket


class Part(NamedTuple):
    """Where a digest belongs: the module, class or global that it is of, and the part of that."""

    owner: str
    name: str


Pieces = list[tuple[str, Any]]
TensorDigests = dict[int, tuple[torch.Tensor, tuple[int, int], bytes]]
"""By the id of a tensor: the tensor, what tells that it is unchanged, and its digest."""

_SUBCLASSED = (int, float, complex, str, bytes, bytearray)
_TEXTS = (bool, *_SUBCLASSED, type(None), type(...), type(NotImplemented))
_TORCH_TEXTS = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.qscheme,
    OpOverload,
    OpOverloadPacket,
)
_DESCRIPTORS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_BUILTINS = (types.BuiltinFunctionType, types.MethodWrapperType)
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")
_WITHOUT_VALUE = ("_thread", "threading", "concurrent", "asyncio", "multiprocessing", "logging")
_CLASS_WITHOUT = {
    *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__slots__", "__firstlineno__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__static_attributes__"),
    *("__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__", "__match_args__"),
    *("__parameters__", "__orig_bases__"),
}
_MODULE_WITHOUT = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders with what is installed."""
_PYTHON = sysconfig.get_path("stdlib")


def digest_of(*parts: str | bytes) -> bytes:
    """Return a digest of some texts, in order."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


@functools.cache
def _standing(module: str) -> str:
    """Return whether a module is ``"known"`` by its version, ``"installed"``, or the user's ``"own"``."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if top in ("torch", "polycast"):
        return "known"
    if file and not _INSTALLED.isdisjoint(Path(file).parts):
        return "installed"
    is_python = top in sys.stdlib_module_names and (not file or Path(_PYTHON) in Path(file).parents)
    return "known" if is_python else "own"


class Reader:
    """Reads values into digests.

    Attributes:
        parts: the digests.
        unknown: what has no digest, as text.
    """

    def __init__(self, modules: Mapping[int, str], tensors: TensorDigests) -> None:
        """Make a reader.

        Args:
            modules: by their ids, the names of modules that are known by these, and read by :meth:`read_module`.
            tensors: digests of tensors, which are used while these are unchanged, and added to.
        """
        self.parts: dict[Part, str] = {}
        self.unknown: dict[str, None] = {}
        self._modules, self._tensors = modules, tensors
        self._at = Part("", "")
        self._memo: dict[int, tuple[Any, bytes]] = {}
        self._open: dict[int, int] = {}
        self._named: list[tuple[str, Any]] = []
        self._met: set[object] = set()
        self._classes: dict[str, int] = {}

    def read(self, part: Part, value: Any, depth: int = 0) -> None:
        """Read a value; a function is read piece by piece, so that its code is a part and each variable in it is."""
        pieces = _pieces(value) if depth < 4 and isinstance(value, _CALLABLES) else None
        if pieces is None:
            self._at, self._open = part, {}
            try:
                digest = self._of(value)
            except Exception:  # of the value's own code, or it is nested too deeply
                digest = self._without_digest(value)
            self.parts[part] = digest.hex()[:16]
            return
        for name, piece in pieces:
            self.read(Part(part.owner, f"{part.name}.{name}" if part.name else name), piece, depth + 1)
        if isinstance(value, types.FunctionType):
            self._meet_globals(value)

    def read_object(self, owner: str, value: Any) -> None:
        """Read an object, attribute by attribute; a function piece by piece."""
        if isinstance(value, torch.nn.Module) and id(value) not in self._modules:
            self.read_module(owner, value)
            return
        attributes = _attributes(value)
        if isinstance(value, (*_CALLABLES, type, torch.nn.Module)) or attributes is None:
            self.read(Part(owner, ""), value)
            return
        self.read(Part(owner, "class"), type(value))
        for name, attribute in attributes:
            self.read(Part(owner, f"self.{name}"), attribute)

    def read_module(self, owner: str, module: torch.nn.Module) -> None:
        """Read a module without those in it, attribute by attribute."""
        for name, piece in self._pieces_of_module(module):
            self.read(Part(owner, name), piece)

    def read_named(self) -> None:
        """Read the classes and the globals that were named by what was read, and by these."""
        while self._named:
            owner, value = self._named.pop(0)
            if not isinstance(value, type):
                self.read(Part(owner, ""), value)
                continue
            is_own = _standing(value.__module__) == "own"
            for name in sorted(set(vars(value)) - _CLASS_WITHOUT):
                attribute = vars(value)[name]
                if is_own or isinstance(attribute, (types.FunctionType, *_WRAPPERS)):
                    self.read(Part(owner, name), attribute)
            self.read(Part(owner, "bases"), value.__bases__)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _meet(self, key: object, owner: str, value: Any) -> None:
        if key not in self._met:
            self._met.add(key)
            self._named.append((owner, value))

    def _meet_package(self, module: str) -> None:
        top = module.partition(".")[0]
        if _standing(module) == "installed":
            self._meet(("package", top), f"package {top}", getattr(sys.modules.get(top), "__version__", None))

    def _meet_class(self, kind: type) -> bytes:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if _standing(kind.__module__) != "known":
            self._meet_package(kind.__module__)
            if id(kind) not in self._met:
                self._memo[id(kind)] = kind, b""  # keeps it alive, so that its id is its own
                self._classes[name] = number = self._classes.get(name, 0) + 1
                self._meet(id(kind), f"class {name}" + (f" ({number})" if number > 1 else ""), kind)
        return digest_of("class", name)

    def _meet_globals(self, function: types.FunctionType) -> None:
        """Read the globals that a function of the user's names, and what it names of the user's modules."""
        scope = function.__globals__
        where = str(scope.get("__name__"))
        if _standing(where) != "own":
            self._meet_package(where)
            return
        names = list(dict.fromkeys(_names(function.__code__)))
        modules: list[Any] = [sys.modules.get(name) for name in names]  # it may import them itself
        modules += map(_contents, function.__closure__ or ())
        searched = {where}
        for name in names:
            if name in scope:
                self._meet_global(where, name, scope[name], modules)
        for module in modules:  # which grows
            if isinstance(module, types.ModuleType) and module.__name__ not in searched:
                searched.add(module.__name__)
                if _standing(module.__name__) == "own":
                    for name in names:
                        if name in vars(module):
                            self._meet_global(module.__name__, name, vars(module)[name], modules)

    def _meet_global(self, module: str, name: str, value: Any, modules: list[Any]) -> None:
        if isinstance(value, types.ModuleType):
            self._meet_package(value.__name__)
            modules.append(value)
        elif isinstance(value, type):
            self._meet_class(value)
        elif not (isinstance(value, types.FunctionType) and _standing(value.__module__ or "") == "known"):
            self._meet((module, name), f"{module}.{name}", value)

    # -- values --------------------------------------------------------------------------------------------------------

    def _of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _TEXTS:
            return digest_of(kind.__name__, hex(value) if kind is int else repr(value))
        known = self._memo.get(id(value))
        if known is not None and known[1]:
            return known[1]
        if id(value) in self._open:
            return digest_of("around", str(len(self._open) - self._open[id(value)]))
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
                return digest_of("module", self._modules[id(value)])
            return self._of_pieces("module", self._pieces_of_module(value))
        if isinstance(value, type):
            return self._meet_class(value)
        if isinstance(value, _CALLABLES):
            if isinstance(value, types.FunctionType):
                self._meet_globals(value)
            return self._of_pieces("callable", _pieces(value) or [])
        if isinstance(value, types.CodeType):
            return self.of_code(value)
        if isinstance(value, enum.Enum):
            return digest_of("enum", self._meet_class(kind), value.name or repr(value.value))
        if isinstance(value, types.ModuleType):
            self._meet_package(value.__name__)
            return digest_of("import", value.__name__)
        if isinstance(value, torch.jit.ScriptFunction):
            return digest_of("script", str(value.graph))
        if isinstance(value, _TORCH_TEXTS):
            return digest_of(kind.__name__, str(value))
        if isinstance(value, _DESCRIPTORS):
            return digest_of("descriptor", f"{value.__objclass__.__qualname__}.{value.__name__}")
        if isinstance(value, _BUILTINS):
            of = value.__self__
            is_global = of is None or isinstance(of, types.ModuleType)
            return digest_of("builtin", value.__qualname__, *([] if is_global else [self._of(of)]))
        if kind.__module__.partition(".")[0] in _WITHOUT_VALUE:
            return digest_of("without value", kind.__qualname__)
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            state = (dict(frame.f_locals), frame.f_lasti) if frame is not None else None
            return digest_of("generator", self.of_code(value.gi_code), self._of(state))
        if isinstance(value, weakref.ReferenceType):
            return digest_of("weak", self._of(value()))
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            content = self._of(value.tolist()) if value.dtype.hasobject else value.tobytes()
            return digest_of("array", str(value.dtype), str(value.shape), content)
        return self._collection(value, kind)

    def _collection(self, value: Any, kind: type) -> bytes:
        """Return the digest of a container, or of a subclass of one with its attributes; or of an object."""
        parts: Iterable[bytes]
        base: Any
        if isinstance(value, (dict, types.MappingProxyType)):
            stored = dict.items(value) if isinstance(value, dict) else value.items()
            items = [digest_of(self._of(key), self._of(item)) for key, item in stored]
            parts = sorted(items) if kind is dict else items
        elif isinstance(value, (list, tuple, deque)):
            base = next(each for each in (list, tuple, deque) if isinstance(value, each))
            parts = [self._of(item) for item in base.__iter__(value)]
        elif isinstance(value, (set, frozenset)):
            parts = sorted(self._of(item) for item in value)
        elif isinstance(value, _SUBCLASSED):
            base = next(each for each in _SUBCLASSED if isinstance(value, each))
            parts = [digest_of(base.__repr__(value))]
        else:
            return self._object(value, kind)
        attributes = [] if kind.__module__ == "builtins" else _attributes(value) or []
        return digest_of(self._meet_class(kind), *parts, self._of_pieces("", attributes))

    def _object(self, value: Any, kind: type) -> bytes:
        attributes = _attributes(value)
        own_reduce = any(getattr(kind, name, None) is not getattr(object, name, None) for name in _PICKLING)
        if attributes and not own_reduce and kind not in copyreg.dispatch_table:
            return self._of_pieces("object", [("class", kind), *attributes])
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:  # of whatever class: it cannot be pickled
            if attributes is not None:
                return self._of_pieces("object", [("class", kind), *attributes])
            return self._without_digest(value)
        if isinstance(reduced, str):
            return digest_of("global", kind.__module__, reduced)
        made = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        return digest_of("object", self._meet_class(kind), *map(self._of, made))

    def _of_pieces(self, what: str, pieces: Pieces) -> bytes:
        return digest_of(what, *(part for name, piece in pieces for part in (name, self._of(piece))))

    def _without_digest(self, value: Any) -> bytes:
        owner, name = self._at
        kind = type(value)
        self.unknown[f"{kind.__module__}.{kind.__qualname__} in {owner}" + (f", {name}" if name else "")] = None
        return digest_of("unknown", kind.__qualname__)

    def of_code(self, code: types.CodeType) -> bytes:
        """Return the digest of code: of what it does, not of where it stands."""
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        exceptions = getattr(code, "co_exceptiontable", b"")
        return digest_of(code.co_code, exceptions, repr(names), *(self._of(each) for each in code.co_consts))

    def _tensor(self, tensor: torch.Tensor) -> bytes:
        try:
            state = (-1 if tensor.is_inference() else tensor._version, tensor.data_ptr())
        except Exception:  # of a subclass, or without storage
            state = (-1, 0)
        known = self._tensors.get(id(tensor))
        if known is not None and known[1] == state and state[0] >= 0:
            return known[2]
        try:
            digest = self._content_of_tensor(tensor)
        except Exception:  # a layout or a subclass that cannot be read so
            return self._without_digest(tensor)
        self._tensors[id(tensor)] = tensor, state, digest
        return digest

    def _content_of_tensor(self, tensor: torch.Tensor) -> bytes:
        said = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {tensor.device.type}"
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, context = flatten()
            inner = [self._of(getattr(tensor, name)) for name in names]
            return digest_of("tensor", said, self._meet_class(type(tensor)), *inner, self._of(context))
        tensor = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            return digest_of("tensor", said, self._of(tensor._indices()), self._of(tensor._values()))
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            indices = (tensor.crow_indices(), tensor.col_indices())
            return digest_of("tensor", said, *map(self._of, indices), self._of(tensor.values()))
        if tensor.is_quantized:
            return digest_of("tensor", said, self._of(tensor.dequantize()), self._of(tensor.int_repr()))
        if tensor.is_meta or not tensor.numel():
            return digest_of("tensor", said)
        if tensor.layout is not torch.strided:
            raise TypeError(tensor.layout)
        host = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        content = hashlib.sha256((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).digest()
        return digest_of("tensor", said, content)

    def _pieces_of_module(self, module: torch.nn.Module) -> Pieces:
        if isinstance(module, torch.jit.ScriptModule):
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            return [("code", module._c.dump_to_str(True, True, False)), *tensors]
        has_compiled = type(module).__module__.startswith("torch._dynamo")  # it runs what it was made of
        attributes = {} if has_compiled else {k: v for k, v in vars(module).items() if k not in _MODULE_WITHOUT}
        children = [(name, child) for name, child in module._modules.items()]
        return [
            ("class", type(module)),
            ("training", module.training),
            *(module._parameters | module._buffers | dict(sorted(attributes.items()))).items(),
            ("modules", children),
            ("hooks", _hooks(module, "_forward_pre_hooks") + _hooks(module, "_forward_hooks")),
        ]


_WRAPPERS = (types.MethodType, functools.partial, staticmethod, classmethod, property, functools._lru_cache_wrapper)
_CALLABLES = (types.FunctionType, *_WRAPPERS)


def _pieces(value: Any) -> Pieces | None:
    """Return what something that can be called is made of."""
    if isinstance(value, types.FunctionType):
        is_known = _standing(str(value.__globals__.get("__name__"))) == "known"
        code = f"{value.__module__}.{value.__qualname__}" if is_known else value.__code__
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [
            ("code", code),
            ("defaults", (value.__defaults__, value.__kwdefaults__)),
            *((f"variable {name}", _contents(cell)) for name, cell in cells),
            *sorted(vars(value).items()),
        ]
    if isinstance(value, types.MethodType):
        of = value.__self__
        attributes = None if isinstance(of, (torch.nn.Module, type)) else _attributes(of)
        named = [("self", of)] if not attributes else [(f"self.{name}", each) for name, each in attributes]
        return [("function", value.__func__), ("class", type(of)), *named]
    if isinstance(value, functools.partial):
        keywords = [(name, value.keywords[name]) for name in sorted(value.keywords)]
        return [("function", value.func), *((f"argument {n}", each) for n, each in enumerate(value.args)), *keywords]
    if isinstance(value, property):
        return [("get", value.fget), ("set", value.fset)]
    if isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
        return [("function", value.__wrapped__)]
    return None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return NotImplemented


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, and in what is defined in it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _attributes(value: Any) -> Pieces | None:
    """Return the attributes of an object, by their names; None if it can have none."""
    own = getattr(value, "__dict__", None)
    said = {str(name): each for name, each in own.items()} if isinstance(own, dict) else None
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(kind):
                said = {} if said is None else said
                with contextlib.suppress(AttributeError):  # it is not set
                    said[name] = slot.__get__(value)
    return None if said is None else sorted(said.items(), key=lambda item: item[0])


def _hooks(module: torch.nn.Module, which: str) -> list[Any]:
    with_kwargs = getattr(module, f"{which}_with_kwargs", ())
    return [(hook, number in with_kwargs) for number, hook in getattr(module, which).items()]
