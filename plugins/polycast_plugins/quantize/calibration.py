"""`Calibration`: what a pass over data found for each weight: factors that even out outliers, and quantized levels."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self, override

from polycast.plugin import Result, memory_of

from . import tensor_file
from .weight_matrices import first_of, matrix_in, parameters_by_name

_FORMAT, _VERSION = "polycast.Calibration", "2"
_SHOWN = 40
_saved: dict[str, str] = {}
"""By digest, the file that a calibration was last saved to or loaded from. Equal ones may be different objects."""


@dataclass(frozen=True, eq=False)
class CalibratedWeight:
    """A weight that was seen in a product while a model was calibrated.

    Attributes:
        name: its name in the model, with the view of it that is multiplied, if that is not all of it.
        shape: its size as a matrix, output features by input channels.
        strength: how far outliers are moved from the activations into the weight, from 0 to 1; 0: not at all, because
            that would not lower the error enough.
        format: the format of the levels that its kernel takes; see ``levels`` of :class:`polycast.plugin.LowBitKernel`.
        error: the relative error of its products on the data, under the recipe, with these factors and levels.
        plain_error: the same without.
        parameter, size: the name and the size of the parameter.
        view: the matrix in the parameter; see ``weight_matrices.py``.
        fingerprint: the fingerprint of its values.
        factors: float32 [K], or None.
        levels: the quantized weight, as the kernel takes it; empty if that would not lower the error.
    """

    name: str
    shape: tuple[int, int]
    strength: float
    format: str
    error: float
    plain_error: float
    parameter: str = field(repr=False)
    size: tuple[int, ...] = field(repr=False)
    view: str = field(repr=False)
    fingerprint: str = field(repr=False)
    factors: torch.Tensor | None = field(repr=False)
    levels: tuple[torch.Tensor, ...] = field(repr=False)

    def described(self) -> dict[str, Any]:
        """Return everything but the name and the tensors, as plain data."""
        return {name: value for name, value in vars(self).items() if name not in ("name", "factors", "levels")}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the factors and levels, by their names in a file."""
        factors = {} if self.factors is None else {self.name: self.factors}
        return {**factors, **dict(zip(_names_of_levels(self.name), self.levels, strict=False))}


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Result):
    """The factors and levels that :func:`calibrate` found, for ``Int8(calibration=...)`` and ``Int4(calibration=...)``.

    *Factors* for the input channels: a kernel divides activations by them and multiplies the weight by them before it
    quantizes both. This does not change the product, but channels of the activations that are much larger than the
    others no longer take all levels. And, for kernels that take them, the *levels* of the quantized weight, chosen so
    that its columns make up for each other's rounding errors. Immutable but for the path; calibrations with equal
    contents are equal. ``print`` shows a table.

    A weight is recognized by its values, rounded to bfloat16, so copies of a model, models that are moved, converted to
    bfloat16 or loaded again (``assign=True``), other processes and unpickled recipes use the same calibration. A weight
    that is *changed* (trained, merged with adapters, converted to float16) is computed without it. For a changed model
    the calibration can be loaded again, which gives it the factors, but not the levels. A weight that the data did not
    reach is computed without it too. :func:`explain` says which.

    Attributes:
        weights: the weights whose products were seen.
        path: the absolute path of the file that it was last saved to or loaded from, which policy files have; None if
            there is none.
        recipe: the `format` of the recipe that it was made with; empty if that is not known.
        digest: the digest of the weights, 16 hexadecimal digits.
    """

    weights: tuple[CalibratedWeight, ...]
    path: str | None = None
    recipe: str = ""
    digest: str = field(init=False)
    _by_fingerprint: Mapping[str, CalibratedWeight] = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for each in self.weights:
            digest.update(json.dumps([each.name, each.described()], sort_keys=True).encode())
            for tensor in each.tensors().values():
                digest.update(memory_of(tensor))
        object.__setattr__(self, "digest", digest.hexdigest()[:16])
        object.__setattr__(self, "_by_fingerprint", {each.fingerprint: each for each in self.weights})

    def factors(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the factors of a weight, float32 [K] in host memory; None if there are none.

        Args:
            weight: [N, K], a row for each output feature: the weight of linear, or the transposed one of mm and addmm.
        """
        found = self._by_fingerprint.get(fingerprint_of(weight))
        return None if found is None or found.factors is None else found.factors.clone()

    def prepack_arguments(self, weight: torch.Tensor, levels: str) -> tuple[Any, ...]:
        """Return what a kernel's ``prepack(weight, ...)`` takes: nothing, factors or None, or these and levels.

        Args:
            weight: as for :meth:`factors`.
            levels: the format of the levels that the kernel takes.
        """
        found = self._by_fingerprint.get(fingerprint_of(weight))
        if found is None:
            return ()
        if found.levels and found.format == levels:
            return found.factors, found.levels
        return () if found.factors is None else (found.factors,)

    def describe(self, weight: torch.Tensor, levels: str = "") -> str:
        """Return whether and how a weight [N, K] is calibrated, for messages.

        Args:
            levels: the format of the levels that its kernel takes.
        """
        found = self._by_fingerprint.get(fingerprint_of(weight))
        if found is None:
            return "not calibrated: the calibration does not have the values of this weight"
        if found.factors is None:
            text = "not equalized, because that did not lower its error on the data"
        else:
            text = f"equalized with strength {found.strength:g}"
        if found.levels and found.format != levels:
            return f"{text}; its levels are of another format, {found.format}"
        return f"{text}; rounding errors compensated" if found.levels else text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a safetensors file: the factors and levels, by name of the weight.

        Raises:
            OSError: the file cannot be written.
        """
        tensors = {name: tensor for each in self.weights for name, tensor in each.tensors().items()}
        described = json.dumps({each.name: each.described() for each in self.weights})
        metadata = {"format": _FORMAT, "version": _VERSION, "recipe": self.recipe, "digest": self.digest}
        metadata["weights"] = described
        tensor_file.write(Path(path), tensors, metadata)
        object.__setattr__(self, "path", os.path.abspath(path))
        _saved[self.digest] = os.path.abspath(path)

    def saved_path(self) -> str:
        """Return the absolute path of a file with this calibration, its own or that of an equal one.

        Raises:
            ValueError: it has no file, or another one was saved there since.
        """
        paths = [path for path in (self.path, _saved.get(self.digest)) if path is not None]
        for path in paths:
            if _digest_in(Path(path)) == self.digest:
                return path
        if not paths:
            raise ValueError(f"{self!r} has no file: save it first, with calibration.save(path)")
        raise ValueError(f"{self!r} is no longer in {paths[0]!r}: save it again, with calibration.save(path)")

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> Self:
        """Return the calibration in a file, for the weights of a model.

        With a model the weights go by name: they may have other values than those that it was made with, such as those
        of a later checkpoint. These get the factors, but not the levels, which are of the former values.

        Args:
            path: a file that :meth:`save` wrote.
            model: a model with the same names and sizes of weights, in any dtype. It may have more. None: for weights
                of the values that it was made with.

        Raises:
            OSError: the file cannot be read.
            TypeError: `model` is neither a module nor None.
            ValueError: the file is damaged or no calibration; it is of another model (the error says what differs); or
                a weight has no values yet.
        """
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        tensors, described, recipe, digest = _read(Path(path))
        try:
            weights = tuple(_restored(name, fields, tensors[name]) for name, fields in described.items())
            found = cls(weights, os.path.abspath(path), recipe)
            is_whole = found.digest == digest
        except (TypeError, ValueError, KeyError):
            is_whole = False
        if not is_whole:
            raise ValueError(f"{os.fspath(path)!r} is damaged: its contents do not have the digest that it says")
        _saved[digest] = os.path.abspath(path)
        if model is None:
            return found
        of_model = replace(found, weights=_of_model(os.fspath(path), found.weights, model))
        return of_model if of_model == found else replace(of_model, path=None)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Calibration) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        factors, levels = (sum(bool(getattr(each, name)) for each in self.weights) for name in ("strength", "levels"))
        return (
            f"<Calibration {self.digest}: factors for {factors} and levels for {levels} of {len(self.weights)} weights>"
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @override
    def to_dict(self) -> dict[str, Any]:
        weights = [{"name": each.name, **each.described()} for each in self.weights]
        return {"digest": self.digest, "path": self.path, "recipe": self.recipe, "weights": weights}

    @override
    def tables(self) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        rows = [
            [
                each.name,
                " x ".join(map(str, each.shape)),
                f"{each.strength:g}" if each.strength else "-",
                each.format if each.levels else "-",
                f"{each.error:.2e}",
                f"{each.plain_error:.2e}",
            ]
            for each in sorted(self.weights, key=lambda each: each.error - each.plain_error)[:_SHOWN]
        ]
        yield ("weight", "size", "strength", "levels", "error", "without"), rows

    @override
    def lines(self) -> Sequence[str]:
        others = len(self.weights) - _SHOWN
        more = [f"{others} more {'weight is' if others == 1 else 'weights are'} not shown."] if others > 0 else []
        return ["Errors of products relative to float32's, on the data.", *more]


def fingerprint_of(weight: torch.Tensor) -> str:
    """Return a digest of the size of a weight and its values in bfloat16."""
    with torch.no_grad():
        values = weight.detach().to(torch.bfloat16).cpu().contiguous()
    digest = hashlib.sha256(f"{list(weight.shape)}".encode())
    digest.update(memory_of(values))
    return digest.hexdigest()[:16]


def _names_of_levels(name: str) -> Iterator[str]:
    """Yield the names of a weight's levels in a file. No name of a weight has two dots in succession."""
    return (f"{name}..{number}" for number in itertools.count())


def _restored(name: str, fields: dict[str, Any], tensors: Sequence[torch.Tensor]) -> CalibratedWeight:
    shape, size = (tuple(map(int, fields[key])) for key in ("shape", "size"))
    factors, *levels = tensors if fields["strength"] else (None, *tensors)
    if factors is not None and (
        factors.shape != shape[1:] or factors.dtype is not torch.float32 or not bool((factors > 0).all())
    ):
        raise ValueError(f"{name} has wrong factors")
    return CalibratedWeight(name=name, factors=factors, levels=(*levels,), **{**fields, "shape": shape, "size": size})


def _of_model(path: str, weights: tuple[CalibratedWeight, ...], model: torch.nn.Module) -> tuple[CalibratedWeight, ...]:
    """Return equalized weights with the fingerprints of a model's.

    Raises:
        ValueError: the model lacks some; or they have other sizes, or no values.
    """
    parameters = parameters_by_name(model)
    found, differences = [], []
    for each in weights:
        parameter = parameters.get(each.parameter)
        if parameter is None:
            differences.append(f"the model has no parameter {each.parameter!r}")
        elif tuple(parameter.shape) != each.size:
            sizes = " and ".join(
                f"{size} in the {where}" for size, where in ((each.size, "file"), (tuple(parameter.shape), "model"))
            )
            differences.append(f"{each.parameter!r} has the size {sizes}")
        elif parameter.is_meta:
            raise ValueError(f"the model's parameter {each.parameter!r} is on meta, without values: load them first")
        else:
            now = fingerprint_of(matrix_in(parameter, each.view))
            found.append(each if now == each.fingerprint else replace(each, fingerprint=now, format="", levels=()))
    if differences:
        raise ValueError(f"{path!r} is the calibration of another model: {first_of(differences, '; ')}")
    return tuple(found)


def _digest_in(path: Path) -> str | None:
    """Return the digest of the calibration in a file, without reading its factors; None if there is none."""
    try:
        file = tensor_file.TensorFile(path)
    except (OSError, ValueError):
        return None
    return file.metadata.get("digest") if file.metadata.get("format") == _FORMAT else None


def _read(path: Path) -> tuple[dict[str, list[torch.Tensor]], dict[str, Any], str, str]:
    """Return the tensors, the description of each weight, the recipe and the digest in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no calibration, or damaged.
    """
    try:
        file = tensor_file.TensorFile(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no calibration: {error}") from error
    if file.metadata.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} is a safetensors file, but not a calibration that polycast saved")
    if file.metadata.get("version") != _VERSION:
        version = file.metadata.get("version")
        raise ValueError(f"{str(path)!r} is of version {version}, and this polycast reads version {_VERSION}")
    try:
        described = dict(json.loads(file.metadata["weights"]))
        tensors: dict[str, list[torch.Tensor]] = {name: [] for name in described}
        for name, fields in described.items():
            if fields["strength"]:
                tensors[name].append(file.tensor(name).clone())
            tensors[name] += map(file.tensor, itertools.takewhile(file.names.__contains__, _names_of_levels(name)))
        return tensors, described, file.metadata["recipe"], file.metadata["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from error
