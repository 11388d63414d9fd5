"""Read a cache from a file, and check that it is of a model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import nn

from polycast import WeightCache
from polycast.plugin import Plan, Recipe, disable_autocast, events, get_backend

from .contents import SavedContents, SavedEntry, SavedTensor, SavedWeight, View, digests, sample_digests, versions
from .kernel_plan import KernelPlan, PlannedKernel, PrepackedFormat
from .saving import flat
from .tensor_file import TensorFile
from .weight_matrices import first_of

Verify: TypeAlias = Literal["all", "sample"]
"""The values of weights and of the file that are compared with digests."""

_REMEDY = "Save a new one: run the model in a region with a WeightCache, and call its save()."


@events.own_work.during()
def load(cache: WeightCache, path: Path, model: nn.Module, verify: Verify) -> None:
    """Fill an empty cache from a file; see ``WeightCache.load``."""
    with _refusing(path):
        file = TensorFile(path)
        contents = SavedContents.of_metadata(file.metadata)
    _check_room(path, cache, contents, file)
    with _refusing(path):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        _check_versions(contents.versions)
        _check_weights(contents.weights, parameters)
        made = [entry.made for entry in contents.entries if isinstance(entry.made, PrepackedFormat)]
        kernels = {each: _kernel(each) for each in dict.fromkeys(made)}
        with torch.inference_mode(False), torch.no_grad():
            is_alike = _are_prepacked_alike(contents.entries, kernels, parameters)
            # Before the digests are computed, so that the cache has stamps: what is written then drops the entries.
            _adopt(cache, contents, file, parameters, kernels)
        _check_digests(contents, file, parameters, verify)
        _check_formats(is_alike)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Name the file, and the remedy, in the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"The saved cache {str(path)!r} cannot be used: {error}. {_REMEDY}") from error


def _check_room(path: Path, cache: WeightCache, contents: SavedContents, file: TensorFile) -> None:
    with _refusing(path):
        size = sum(file.tensor(part.name).nbytes for entry in contents.entries for part in entry.tensors)
    if cache.max_bytes is not None and size > cache.max_bytes:
        raise ValueError(
            f"The saved cache {str(path)!r} has {size} bytes of casts and prepacked weights, more than "
            f"max_bytes={cache.max_bytes}: pass at least {size}, or None for no limit."
        )


def _check_versions(saved: Mapping[str, str]) -> None:
    for name, version in versions().items():
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
    missing = [name for name, value in recipe.settings.items() if value is not None and recipe.known(name) is None]
    if missing:
        raise ValueError(
            f"it has weights for the recipe {recipe!r}, whose {missing[0]} this process does not have: make "
            "the recipe first, such as Int8(calibration=Calibration.load(path))"
        )
    plan = Plan.of(get_backend(wanted.device), recipe)
    if wanted.op not in plan.kernels:
        raise ValueError(
            f"it has weights for {wanted.op} with the recipe {recipe!r}, and here {plan.why_no_kernel(wanted.op)}"
        )
    assert isinstance(plan, KernelPlan)  # it has kernels
    offered = list(plan.planned[wanted.op])
    for name in ("backend", "kernel"):
        was, now = getattr(wanted, name), [getattr(each.format, name) for each in offered]
        if was not in now:
            raise ValueError(
                f"the {name} of {wanted.op} with the recipe {recipe!r} was {was}, and is {' or '.join(now)}"
            )
        offered = [each for each in offered if getattr(each.format, name) == was]
    return offered[0]


def _are_prepacked_alike(
    entries: Sequence[SavedEntry],
    kernels: Mapping[PrepackedFormat, PlannedKernel],
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, bool]:
    """Prepack the smallest weight of each format; return, by description, whether it has the bytes of the file.

    A kernel may have changed without a new version.
    """
    found = {}
    for wanted, planned in kernels.items():
        alike = [entry for entry in entries if entry.made == wanted]
        entry = min(alike, key=lambda entry: _source(entry, parameters).numel())
        with disable_autocast():
            # A copy: in other threads, an alias of the weight would keep what is made of it from being cached.
            prepacked = planned.prepack(_source(entry, parameters).clone()) or ()
        what = f"{entry.weight!r} for {wanted.op} with the recipe {Recipe.of_text(wanted.recipe)!r}"
        found[what] = digests([flat(part) for part in prepacked]) == [part.digest for part in entry.tensors]
    return found


def _check_formats(is_alike: Mapping[str, bool]) -> None:
    """Raise ValueError if the backend prepacks an equal weight to other bytes."""
    for what, is_same in is_alike.items():
        if not is_same:
            raise ValueError(f"the backend prepacks {what} differently here")


def _adopt(
    cache: WeightCache,
    contents: SavedContents,
    file: TensorFile,
    parameters: Mapping[str, nn.Parameter],
    kernels: Mapping[PrepackedFormat, PlannedKernel],
) -> None:
    for entry in contents.entries:
        weight = parameters[entry.weight]
        tensors = [
            file.tensor(part.name).as_strided(part.shape, part.strides).detach().to(weight.device)
            for part in entry.tensors
        ]
        if isinstance(entry.made, PrepackedFormat):
            kind: torch.dtype | int = kernels[entry.made].prepack_id
        else:
            kind = getattr(torch, entry.made)
        try:
            cache.adopt(weight, entry.view, kind, tensors)
        except ValueError as error:
            raise ValueError(f"what was made of {entry.weight!r} {error}") from error


def _check_digests(
    contents: SavedContents, file: TensorFile, parameters: Mapping[str, nn.Parameter], verify: Verify
) -> None:
    saved = [part for entry in contents.entries for part in entry.tensors]
    tensors = [file.tensor(part.name) for part in saved]
    compute = digests if verify == "all" else sample_digests
    found = iter(compute([*(parameters[name] for name in contents.weights), *tensors]))
    changed = [name for name, weight in contents.weights.items() if next(found) != _digest_of(weight, verify)]
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
