"""An entry of a store: a cast or a prepacked weight, and the stamp of the weight that it was made of."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..casts.weights import TensorBase

Prepacked: TypeAlias = tuple[torch.Tensor, ...] | None


@dataclass(slots=True)
class Entry:
    """A cast or a prepacked weight, valid while the stamp matches."""

    stamp: tuple[object, ...]
    storage: StorageWeakRef  # reserves the storage's identity
    tensors: Prepacked  # a cast, or the prepacked weight
    versions: tuple[int, ...] = ()
    nbytes: int = 0
    original: torch.Tensor | None = None  # if a prepacked weight is to be verified, a copy of the weight
    sees_all_writes: bool = True  # nothing else held the weight's memory

    def __post_init__(self) -> None:
        self.versions = _versions(self.tensors)
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors or ())

    def matches(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is unchanged, and nothing has written to the cast."""
        return self.versions == _versions(self.tensors) and self.stamp == version_stamp(weight)

    @property
    def cast(self) -> torch.Tensor:
        """The cast."""
        assert self.tensors is not None
        return self.tensors[0]


def _versions(tensors: Prepacked) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors or ())


def version_stamp(weight: torch.Tensor) -> tuple[object, ...]:
    """Return a weight's version, storage, address and layout, and the current stream: others do not use its cast."""
    storage, address = TensorBase.untyped_storage(weight), TensorBase.data_ptr(weight)
    return weight._version, storage._cdata, address, weight.shape, weight.stride(), _stream(weight)


def _stream(weight: torch.Tensor) -> object:
    accelerator = None if weight.is_cpu else torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != weight.device.type:
        return None
    return torch.accelerator.current_stream(weight.device.index)
