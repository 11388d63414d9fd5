"""The tensors in inputs and outputs of models, in containers or objects such as a key-value cache, and their errors."""

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from polycast.plugin import Result, torch_name

_T = TypeVar("_T")
_TRANSFORMED = "polycast.compare does not see writes to arguments of modules under functorch transforms"
_is_wrapped: Callable[[torch.Tensor], bool] = torch_name(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False, _TRANSFORMED
)
_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch_name(
    "torch._C._functorch.get_unwrapped", lambda tensor: tensor.detach(), _TRANSFORMED
)
_CHUNK = 1 << 20
"""The number of elements compared at once, in float64 on the host, because not every device supports float64."""


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value with their paths: ``logits``, ``[0]``, ``cache.layers[1].keys``."""
    for path, each in _walk(value, name, set()):
        if isinstance(each, torch.Tensor):
            yield path, each


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield a value and the values in it with their paths. A value with several paths is entered once."""
    yield name, value
    if isinstance(value, torch.Tensor) or id(value) in seen:
        return
    parts = _parts(value, name)
    if parts is not None:
        seen.add(id(value))
        for path, part in parts:
            yield from _walk(part, path, seen)


def _parts(value: Any, name: str) -> list[tuple[str, Any]] | None:
    """Return the items of a container, or the attributes of an object, with their paths; None for other values."""
    if isinstance(value, Mapping):
        return [(_joined(name, key) if isinstance(key, str) else f"{name}[{key!r}]", value[key]) for key in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(_joined(name, key), getattr(value, key)) for key in value._fields]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(f"{name}[{position}]", item) for position, item in enumerate(value)]
    if isinstance(value, (type, torch.nn.Module)) or callable(value):
        return None
    attributes = {key: getattr(value, key) for key in _slots(type(value)) if hasattr(value, key)}
    if not attributes and not hasattr(value, "__dict__"):
        return None
    return [(_joined(name, key), item) for key, item in {**attributes, **getattr(value, "__dict__", {})}.items()]


def _slots(cls: type) -> list[str]:
    """Return the names in the ``__slots__`` of a user's class and its bases."""
    if cls.__module__ == "builtins":
        return []
    slots = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if not name.startswith("__")]


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


class _Cloning(TorchFunctionMode):
    """Lets deepcopy accept non-leaf tensors, and clones tensors without the rest of their storage.

    `aliases` are the ids of tensors that overlap others; their storage is copied, once for all of them.
    """

    def __init__(self, aliases: Collection[int], keeps_gradients: bool) -> None:
        super().__init__()
        self._aliases, self._keeps_gradients = aliases, keeps_gradients
        self._alive: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        detached = tensor.detach()
        if id(tensor) not in self._aliases:
            return detached.clone().requires_grad_(tensor.requires_grad and self._keeps_gradients)
        self._alive.append(detached)  # the memo has its id
        requires_grad = tensor.requires_grad and self._keeps_gradients
        return func(detached, memo).requires_grad_(requires_grad)  # type: ignore[no-untyped-call]


def copied(value: _T, model: torch.nn.Module, *, keeps_gradients: bool = True) -> _T:
    """Return a deep copy of a value, in which modules of the model are not copied.

    Tensors in it require gradients as the originals do, or none.
    """
    memo: dict[int, Any] = {id(module): module for module in model.modules()}
    with _Cloning(_aliases(value), keeps_gradients):
        return copy.deepcopy(value, memo)


def cloned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return clones of tensors; those of tensors that overlap do so, too."""
    with _Cloning(_aliases(tensors), keeps_gradients=False):
        return copy.deepcopy(tensors)


def replaced(value: _T, tensors: Mapping[int, object], modules: Mapping[int, torch.nn.Module]) -> _T:
    """Return a deep copy of a value with other objects in place of its tensors, and with modules that are not copied.

    Both are given by the ids of the originals.
    """
    return copy.deepcopy(value, {**modules, **tensors})


def _aliases(value: object) -> set[int]:
    """Return the ids of the tensors in a value whose ranges of a storage overlap those of others in it."""
    by_storage: dict[int, dict[int, torch.Tensor]] = {}
    for _, tensor in tensors_in(value):
        with suppress(NotImplementedError):  # sparse tensors and some subclasses have no storage
            by_storage.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return {
        key
        for tensors in by_storage.values()
        for key, one in tensors.items()
        if any(one is not other and _overlap(_range(one), _range(other)) for other in tensors.values())
    }


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of its storage that a tensor spans, in bytes."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, last = int(tensor.storage_offset()), int(last)
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write to a tensor; 0 for a tensor made in inference mode, which has none."""
    try:
        version = tensor._version
    except RuntimeError:
        return 0
    while _is_wrapped(tensor):  # each level of functorch counts its own writes
        tensor = _unwrapped(tensor)
        version += tensor._version
    return version


class Contents:
    """The values in a value, and the versions of its tensors, for detecting writes."""

    def __init__(self, value: object) -> None:
        held = _walk(value, "", set())
        self._held = [(path, each, version_of(each) if isinstance(each, torch.Tensor) else 0) for path, each in held]

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the tensors."""
        return {each.dtype for _, each, _ in self._held if isinstance(each, torch.Tensor)}

    def differ_from(self, value: object) -> bool:
        """Return whether a value has been written to since."""
        now = Contents(value)._held
        return len(now) != len(self._held) or any(
            one is not two or (path, version) != (path_before, version_before)
            for (path, one, version), (path_before, two, version_before) in zip(now, self._held, strict=True)
        )

    def written(self) -> set[str]:
        """Return the paths of the tensors that have been written to since."""
        return {
            path for path, each, version in self._held if isinstance(each, torch.Tensor) and version_of(each) != version
        }


@dataclass(frozen=True)
class Error(Result):
    """The error of tensors against a reference.

    Attributes:
        max: the largest absolute error.
        relative: the L2 norm of the error, relative to the L2 norm of the reference.
        cosine: the cosine similarity; nan if the error of an element is infinite.
        inf, nan: the numbers of inf and nan elements.
        made: the number of inf or nan elements that are finite in the reference. Their error is infinite; the same inf
            or nan in both is no error.
    """

    max: float
    relative: float
    cosine: float
    inf: int
    nan: int
    made: int


class Sums:
    """The sums from which the `Error` of several tensors is computed."""

    def __init__(self) -> None:
        self._max = self._error = self._reference = self._other = self._product = 0.0
        self.elements = self.inf = self.nan = self.made = 0

    @classmethod
    def of(cls, reference: object, other: object) -> "Sums":
        """Return the sums of the tensors in a value.

        The error of a tensor without a counterpart, or with one of another shape, is infinite.
        """
        sums = cls()
        for expected, got in zip_longest(_compared(reference), _compared(other)):
            if expected is None or got is None or expected.shape != got.shape:
                sums._max = sums._error = math.inf
                continue
            for one, two in zip(_chunks(expected), _chunks(got), strict=True):
                sums._add(one, two)
        return sums

    def add(self, other: "Sums") -> None:
        """Add the sums of other tensors."""
        highest = max(self._max, other._max)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self._max = highest

    def _add(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        finite = reference.isfinite()
        same = (reference == other) | (reference.isnan() & other.isnan())
        error = torch.where(same, 0.0, (other - reference).abs()).nan_to_num(math.inf, math.inf)
        self._max = max(self._max, error.max().item())
        self._error += error.square().sum().item()
        reference, sound = torch.where(finite, reference, 0.0), torch.where(other.isfinite(), other, 0.0)
        self._reference += reference.square().sum().item()
        self._other += sound.square().sum().item()
        self._product += torch.dot(reference, sound).item()
        self.elements += other.numel()
        self.inf += int(other.isinf().sum())
        self.nan += int(other.isnan().sum())
        self.made += int((finite & ~other.isfinite()).sum())

    @property
    def norm(self) -> float:
        """The L2 norm of the reference."""
        return math.sqrt(self._reference)

    @property
    def norm_of_error(self) -> float:
        """The L2 norm of the error."""
        return math.sqrt(self._error)

    @property
    def relative(self) -> float:
        """The relative L2 error."""
        return self.relative_to(self)

    def relative_to(self, other: "Sums") -> float:
        """Return the L2 norm of this error relative to the reference of other sums."""
        if self._error == 0:
            return 0.0
        return math.sqrt(self._error / other._reference) if other._reference else math.inf

    def error(self) -> Error:
        """Return the error."""
        norms = math.sqrt(self._reference) * math.sqrt(self._other)
        if math.isinf(self._error):
            cosine = math.nan
        elif norms == 0:
            cosine = 1.0 if self._reference == self._other else 0.0
        else:
            cosine = max(-1.0, min(1.0, self._product / norms))
        return Error(self._max, self.relative, cosine, self.inf, self.nan, self.made)

    @property
    def has_no_finite(self) -> bool:
        """Whether there are elements, and none is finite."""
        return self.inf + self.nan == self.elements > 0

    def nonfinite_warning(self, consequence: str, reference: str = "float32") -> str:
        """Return a warning about the inf and nan elements in the output of a reference."""
        counts = " and ".join(f"{count} {what}" for count, what in ((self.inf, "inf"), (self.nan, "nan")) if count)
        none = ", and no finite one" if self.has_no_finite else ""
        return (
            f"{reference}'s own output has {counts} among its {self.elements} elements{none}: {consequence}. "
            "polycast.observe() names the op that makes the first of them."
        )


def relative_error(output: object, reference: object) -> float:
    """Return the relative L2 error over all floating-point tensors in an output: the default metric.

    The error of an element that is inf or nan in only one of the two is infinite.
    """
    return Sums.of(reference, output).relative


def has_floats(value: object) -> bool:
    """Return whether a value contains floating-point or complex tensors."""
    return next(_compared(value), None) is not None


def is_finite(value: object) -> bool:
    """Return whether all elements of the tensors in a value are finite."""
    sums = Sums.of(value, value)
    return not (sums.inf or sums.nan)


def _compared(value: object) -> Iterator[torch.Tensor]:
    for _, tensor in tensors_in(value):
        if tensor.layout is torch.strided:
            if tensor.is_complex():
                yield torch.view_as_real(tensor.detach().resolve_conj())
            elif tensor.is_floating_point():
                yield tensor.detach()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1)
    for chunk in torch.split(flat, _CHUNK) if flat.numel() else ():
        yield chunk.cpu().double()
