"""Read a cache from a file, and check that it is of a model."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import nn

from ...common.atfork import hold_during_fork
from ...common.events import events
from ...common.plain_text import first_of
from ...common.versions import package_versions
from ...policy.recipe import Recipe
from ...policy.recipe_settings import ObjectDigest
from ...policy.tensor_file import TensorFile
from ...registry.registry import registry
from ...torch_internals.dispatcher import disable_autocast
from .. import state
from ..casts.cast_cache import CastCache, EntryKind
from ..casts.not_prepacked import WRITTEN_UNSEEN
from ..installation import watch_writes
from ..recipes.compute import plan_for
from ..recipes.kernel_plan import KernelPlan, PlannedKernel
from ..recipes.prepacked_format import PrepackedFormat, format_of
from .digests import digests, sample_digests
from .manifest import Manifest, SavedEntry, SavedTensor, SavedWeight, View
from .saving import flat

Verify: TypeAlias = Literal["all", "sample"]
"""The values of weights and of the file that are compared with digests."""

_REMEDY = "Save a new one: run the model in a region with a WeightCache, and call its save()."
_lock = threading.Lock()
"""Held while views of weights are made, which keep other threads from adding entries on the reference engine."""
hold_during_fork(lambda: [_lock])


@events.own_work.during()
def load(cache: CastCache, path: Path, model: nn.Module, verify: Verify) -> None:
    """Fill an empty cache from a file; see ``WeightCache.load``."""
    with _refusing(path):
        file = TensorFile(path)
        manifest = Manifest.of_metadata(file.metadata)
    _check_room(path, cache, manifest, file)
    with _refusing(path):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        _check_versions(manifest.versions)
        _check_weights(manifest.weights, parameters)
        made = [entry.made for entry in manifest.entries if isinstance(entry.made, PrepackedFormat)]
        kernels = {each: _kernel(each) for each in dict.fromkeys(made)}
        with _lock, torch.inference_mode(False), torch.no_grad():
            is_alike = _are_prepacked_alike(manifest.entries, kernels, parameters)
            # Before the digests are computed, so that the cache has stamps: what is written then drops the entries.
            _adopt(cache, manifest, file, parameters, kernels)
        _check_digests(manifest, file, parameters, verify)
        _check_formats(is_alike)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Name the file, and the remedy, in the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"The saved cache {str(path)!r} cannot be used: {error}. {_REMEDY}") from error


def _check_room(path: Path, cache: CastCache, manifest: Manifest, file: TensorFile) -> None:
    with _refusing(path):
        size = sum(file.tensor(part.name).nbytes for entry in manifest.entries for part in entry.tensors)
    if cache.max_bytes is not None and size > cache.max_bytes:
        raise ValueError(
            f"The saved cache {str(path)!r} has {size} bytes of casts and prepacked weights, more than "
            f"max_bytes={cache.max_bytes}: pass at least {size}, or None for no limit."
        )


def _check_versions(saved: Mapping[str, str]) -> None:
    for name, version in package_versions().items():
        if saved.get(name) != version:
            raise ValueError(f"it was saved with {name} {saved.get(name)}, and this is {name} {version}")


def _check_weights(saved: Mapping[str, SavedWeight], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, weight in saved.items():
        if name not in parameters:
            raise ValueError(f"the model has no parameter {name!r}")
        if parameters[name].is_meta:
            raise ValueError(f"the parameter {name!r} has no values yet: it is on the device 'meta'")
        if parameters[name].is_inference():
            raise ValueError(f"the parameter {name!r} was made in inference mode, in which torch counts no writes")
        here = SavedWeight.of(parameters[name], weight.digest, weight.sample_digest)
        if here != weight:
            raise ValueError(f"the parameter {name!r} is {here}, and was {weight}")


def _kernel(wanted: PrepackedFormat) -> PlannedKernel:
    try:
        recipe = Recipe.of_text(wanted.recipe)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"it has weights for the recipe {wanted.recipe!r}, which is not known here ({error})"
        ) from error
    missing = [name for name, value in recipe.settings.items() if isinstance(value, ObjectDigest)]
    if missing:
        raise ValueError(
            f"it has weights for the recipe {recipe!r}, whose {missing[0]} this process does not have: load that "
            "first, as Equalization.load does"
        )
    plan = plan_for(registry.find(wanted.device), recipe)
    if wanted.op not in plan.kernels:
        raise ValueError(
            f"it has weights for {wanted.op} with the recipe {recipe!r}, and here {plan.why_no_kernel(wanted.op)}"
        )
    assert isinstance(plan, KernelPlan)  # it has kernels
    offered = [(format_of(each.by, recipe, wanted.op, each.kernel), each) for each in plan.planned[wanted.op]]
    for name in ("backend", "kernel"):
        was, now = getattr(wanted, name), [getattr(made, name) for made, _ in offered]
        if was not in now:
            raise ValueError(
                f"the {name} of {wanted.op} with the recipe {recipe!r} was {was}, and is {' or '.join(now)}"
            )
        offered = [each for each in offered if getattr(each[0], name) == was]
    return offered[0][1]


def _are_prepacked_alike(
    entries: Sequence[SavedEntry],
    kernels: Mapping[PrepackedFormat, PlannedKernel],
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, bool]:
    """Prepack one weight of each format, the smallest; return by description whether it has the bytes of the file.

    A kernel may have changed without another version.
    """
    found = {}
    for wanted, planned in kernels.items():
        alike = [entry for entry in entries if entry.made == wanted]
        entry = min(alike, key=lambda entry: _source(entry, parameters).numel())
        with disable_autocast():
            prepacked = planned.prepack(_source(entry, parameters)) or ()
        what = f"{entry.weight!r} for {wanted.op} with the recipe {Recipe.of_text(wanted.recipe)!r}"
        found[what] = digests([flat(part) for part in prepacked]) == [part.digest for part in entry.tensors]
    return found


def _check_formats(is_alike: Mapping[str, bool]) -> None:
    """Raise ValueError if the backend prepacks a weight, of the same values, in other bytes."""
    for what, is_same in is_alike.items():
        if not is_same:
            raise ValueError(f"the backend prepacks {what} differently here")


def _adopt(
    cache: CastCache,
    manifest: Manifest,
    file: TensorFile,
    parameters: Mapping[str, nn.Parameter],
    kernels: Mapping[PrepackedFormat, PlannedKernel],
) -> None:
    watch_writes()
    store = state.machine.store(cache)
    for entry in manifest.entries:
        source = _source(entry, parameters)
        tensors = [
            file.tensor(part.name).as_strided(part.shape, part.strides).detach().to(source.device)
            for part in entry.tensors
        ]
        if isinstance(entry.made, PrepackedFormat):
            kind: EntryKind = kernels[entry.made].prepack_id
        else:
            kind = getattr(torch, entry.made)
        if not store.adopt(source, kind, tensors):
            raise ValueError(f"what was made of {entry.weight!r} cannot be cached: {WRITTEN_UNSEEN}")


def _check_digests(
    manifest: Manifest, file: TensorFile, parameters: Mapping[str, nn.Parameter], verify: Verify
) -> None:
    saved = [part for entry in manifest.entries for part in entry.tensors]
    tensors = [file.tensor(part.name) for part in saved]
    compute = digests if verify == "all" else sample_digests
    found = iter(compute([*(parameters[name] for name in manifest.weights), *tensors]))
    changed = [name for name, weight in manifest.weights.items() if next(found) != _digest_of(weight, verify)]
    if changed:
        raise ValueError(f"the values of {first_of(map(repr, changed))} are not those that it was made of")
    for part, digest in zip(saved, found, strict=True):
        if _digest_of(part, verify) != digest:
            raise ValueError(f"its tensor {part.name!r} is damaged")


def _digest_of(saved: SavedWeight | SavedTensor, verify: Verify) -> str:
    return saved.digest if verify == "all" else saved.sample_digest


def _source(entry: SavedEntry, parameters: Mapping[str, nn.Parameter]) -> torch.Tensor:
    """Return the parameter that an entry was made of, or the view of it."""
    weight = parameters[entry.weight]
    return weight if entry.view is None else _view(weight, entry.view)


def _view(weight: torch.Tensor, view: View) -> torch.Tensor:
    sizes, strides, offset = view
    return weight.as_strided(sizes, strides, weight.storage_offset() + offset)
