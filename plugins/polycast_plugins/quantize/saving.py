"""Write a cache to a file."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polycast import WeightCache
from polycast.plugin import dtype_name, events

from . import tensor_file
from .contents import SavedContents, SavedEntry, SavedTensor, SavedWeight, digests, sample_digests, versions
from .kernel_plan import PrepackedFormat, format_of_id

_NOTHING = (
    "There is nothing to save: the cache has no casts or prepacked weights of the model's parameters. Run the model in "
    "a region with this cache first, on the native engine."
)


@events.own_work.during()
def save(cache: WeightCache, path: Path, model: nn.Module) -> None:
    """Write a cache to a file; see ``WeightCache.save``."""
    stored = cache.entries()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    entries = sorted((each for each in stored if id(each.weight) in names), key=_order(names))
    if not entries:
        raise ValueError(_NOTHING)
    made = [_made(each, names[id(each.weight)]) for each in entries]
    weights = {names[id(each.weight)]: each.weight for each in entries}
    tensors: dict[str, torch.Tensor] = {}
    layouts = [
        _layouts(number, each, made[number], names[id(each.weight)], tensors) for number, each in enumerate(entries)
    ]
    hashed = [*weights.values(), *tensors.values()]
    found = zip(digests(hashed), sample_digests(hashed), strict=True)
    saved_weights = {name: SavedWeight.of(weight, *next(found)) for name, weight in weights.items()}
    by_tensor = dict(zip(tensors, found, strict=True))
    _check_unchanged(entries, cache, names)
    saved = [
        SavedEntry(
            names[id(each.weight)],
            each.view,
            made_by,
            tuple(SavedTensor(name, sizes, strides, *by_tensor[name]) for name, sizes, strides in of_entry),
        )
        for each, made_by, of_entry in zip(entries, made, layouts, strict=True)
    ]
    tensor_file.write(path, tensors, SavedContents(versions(), saved_weights, saved).metadata())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor, or its elements in the order of its memory if it is not contiguous."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _order(names: Iterable[int]) -> Callable[[Any], tuple[object, ...]]:
    """Return a key that sorts entries as the parameters of the model, so that a file is the same each time."""
    positions = {identity: position for position, identity in enumerate(names)}
    return lambda entry: (positions[id(entry.weight)], str(entry.kind), entry.view or ())


def _made(entry: Any, weight: str) -> str | PrepackedFormat:
    """Return the dtype of a cast, or the format of a prepacked weight."""
    if isinstance(entry.kind, torch.dtype):
        return dtype_name(entry.kind)
    found = format_of_id(entry.kind)
    if found is None:
        raise ValueError(
            f"{weight!r} cannot be saved: it is prepacked by a recipe whose plan is not of this plugin. Save a cache "
            "that was used with other recipes only."
        )
    return found


def _layouts(
    number: int, entry: Any, made: str | PrepackedFormat, weight: str, tensors: dict[str, torch.Tensor]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Add the tensors of an entry to those of the file; return the name, shape and strides of each."""
    found = []
    for position, tensor in enumerate(entry.tensors):
        if not tensor_file.can_be_written(tensor) or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            maker = "a cast" if isinstance(made, str) else made.kernel
            raise ValueError(
                f"{weight!r} cannot be saved: {maker} made a tensor of {dtype_name(tensor.dtype)}, {tensor.layout}, "
                f"with sizes {list(tensor.shape)} and strides {list(tensor.stride())}. Only dense tensors of dtypes "
                "that safetensors has can be saved."
            )
        name = f"{weight}/{number}/{position}"
        tensors[name] = flat(tensor)
        found.append((name, tuple(tensor.shape), tensor.stride()))
    return found


def _check_unchanged(entries: Iterable[Any], cache: WeightCache, names: Mapping[int, str]) -> None:
    """Raise RuntimeError if an entry is not in the cache any more, so that its weight may have another digest."""
    still = {_identity(each) for each in cache.entries()}
    for each in entries:
        if _identity(each) not in still:
            raise RuntimeError(
                f"The cache changed while it was saved: its entry of {names[id(each.weight)]!r} is gone. Save it while "
                "no thread writes the weights or clears the cache."
            )


def _identity(entry: Any) -> tuple[object, ...]:
    return id(entry.weight), entry.view, entry.kind, tuple(map(id, entry.tensors))
