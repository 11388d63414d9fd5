"""The table of contents of a saved cache: the weights, and the casts and prepacked weights made of them.

Digests tell whether tensors have the same values. A digest covers all bytes: otherwise it could miss a change of a
single row, as by editing a model or training its embeddings. A sample digest suffices to tell models apart, and leaves
most pages of mapped weights unread. Both are SHA-256, for which most processors have instructions. hashlib releases the
GIL, so threads hash the chunks of all tensors at once: several GB in a second.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar

import torch

import polycast
from polycast.plugin import dtype_name, memory_of

from .kernel_plan import PrepackedFormat

_T = TypeVar("_T")
SCHEMA = 2
_KEY = "polycast.WeightCache"
_DIGEST_KEY = f"{_KEY}.digest"
_CHUNK = 2**23
_SAMPLES, _SAMPLE = 64, 4096
"""The blocks of a sample of each tensor, and their bytes."""

View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset of a view, the offset from the weight's."""


def versions() -> dict[str, str]:
    """Return the versions that a file depends on."""
    return {"polycast": polycast.__version__, "torch": str(torch.__version__)}


@dataclass(frozen=True)
class SavedWeight:
    """A weight, which is not in the file itself."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    digest: str
    sample_digest: str

    @classmethod
    def of(cls, weight: torch.Tensor, digest: str, sample_digest: str) -> "SavedWeight":
        """Return the description of a weight."""
        return cls(dtype_name(weight.dtype), tuple(weight.shape), weight.stride(), digest, sample_digest)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} with strides {list(self.strides)}"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in the file. Its memory is dense, with the dimensions in any order."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    digest: str
    sample_digest: str


@dataclass(frozen=True)
class SavedEntry:
    """An entry of the cache: the cast to a dtype, or the prepacked weight, of a parameter or a view of one."""

    weight: str
    view: View | None
    made: str | PrepackedFormat
    tensors: tuple[SavedTensor, ...]


@dataclass(frozen=True)
class SavedContents:
    """The contents of the file."""

    versions: Mapping[str, str]
    weights: Mapping[str, SavedWeight]
    entries: Sequence[SavedEntry]

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file."""
        formats = list(dict.fromkeys(entry.made for entry in self.entries if isinstance(entry.made, PrepackedFormat)))
        content = {
            "schema": SCHEMA,
            "versions": dict(self.versions),
            "weights": {name: asdict(weight) for name, weight in self.weights.items()},
            "packings": [asdict(each) for each in formats],
            "entries": [
                {**asdict(entry), "made": entry.made if isinstance(entry.made, str) else formats.index(entry.made)}
                for entry in self.entries
            ],
        }
        text = json.dumps(content)
        return {_KEY: text, _DIGEST_KEY: digest_of_text(text)}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> "SavedContents":
        """Return the contents in the metadata of a file.

        Raises:
            ValueError: it has none, or one that is damaged or of another schema.
        """
        text = metadata.get(_KEY)
        if text is None:
            raise ValueError("it was not saved by WeightCache.save")
        if metadata.get(_DIGEST_KEY) != digest_of_text(text):
            raise ValueError("its table of contents is damaged")
        content: dict[str, Any] = json.loads(text)
        if content["schema"] != SCHEMA:
            raise ValueError(f"it has schema {content['schema']!r}, and this polycast reads schema {SCHEMA}")
        formats = [PrepackedFormat(**each) for each in content["packings"]]
        weights = {name: _decoded(SavedWeight, each) for name, each in content["weights"].items()}
        return cls(content["versions"], weights, [_entry(each, formats) for each in content["entries"]])


def _decoded(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """Return a value of a class, given its fields as JSON has them."""
    return kind(**{name: _tupled(value) for name, value in data.items()})


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _entry(data: dict[str, Any], formats: Sequence[PrepackedFormat]) -> SavedEntry:
    made = data["made"] if isinstance(data["made"], str) else formats[data["made"]]
    tensors = tuple(_decoded(SavedTensor, each) for each in data["tensors"])
    return SavedEntry(data["weight"], _tupled(data["view"]), made, tensors)


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of each tensor: of its dtype, shape and values, in hexadecimal digits."""
    with torch.no_grad():
        dense = [tensor.cpu().contiguous() for tensor in tensors]  # not detached: an alias would keep casts from caches
    chunks = [(each, begin) for each in dense for begin in range(0, each.nbytes, _CHUNK)]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        hashes = iter(list(pool.map(lambda chunk: _hash(_bytes(*chunk)), chunks)))
    found = []
    for each in dense:
        head = f"{each.dtype} {list(each.shape)}".encode()
        found.append(_hash(head + b"".join(next(hashes) for _ in range(0, each.nbytes, _CHUNK))).hex())
    return found


def sample_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of each tensor: of its dtype and shape, and of a sample of its values, from start to end."""
    with torch.no_grad():
        return [_sample_digest(tensor.cpu().contiguous()) for tensor in tensors]


def _sample_digest(tensor: torch.Tensor) -> str:
    content = memory_of(tensor)
    last = max(len(content) - _SAMPLE, 0)
    begins = sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
    head = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return _hash(head + b"".join(content[begin : begin + _SAMPLE] for begin in begins)).hex()


def digest_of_text(text: str) -> str:
    """Return a digest of a text, in hexadecimal digits."""
    return _hash(text.encode()).hex()


def _bytes(tensor: torch.Tensor, begin: int) -> memoryview:
    return memory_of(tensor)[begin : begin + _CHUNK]


def _hash(content: Any) -> bytes:
    return hashlib.sha256(content).digest()
