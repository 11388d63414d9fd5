"""The files of equalizations: safetensors, with a description of each weight in the metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import tensor_file

_FORMAT, _VERSION = "polycast.Equalization", "1"


def write(path: Path, tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any], digest: str) -> None:
    """Write tensors and a description of each weight, in place of a file that is there.

    Raises:
        OSError: the file cannot be written.
    """
    metadata = {"format": _FORMAT, "version": _VERSION, "digest": digest, "weights": json.dumps(described)}
    tensor_file.write(path, tensors, metadata)


def digest_in(path: Path) -> str | None:
    """Return the digest of the equalization in a file, without reading its factors; None if there is none."""
    try:
        file = tensor_file.TensorFile(path)
    except (OSError, ValueError):
        return None
    return file.metadata.get("digest") if file.metadata.get("format") == _FORMAT else None


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
    """Return the tensors, the description of each weight, and the digest in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no equalization, or damaged.
    """
    try:
        file = tensor_file.TensorFile(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no equalization: {error}") from error
    if file.metadata.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} is a safetensors file, but not an equalization that polycast saved")
    if file.metadata.get("version") != _VERSION:
        raise ValueError(f"{str(path)!r} is of version {file.metadata.get('version')}: install a newer polycast")
    try:
        described = dict(json.loads(file.metadata["weights"]))
        tensors = {name: file.tensor(name).clone() for name, fields in described.items() if fields["strength"]}
        return tensors, described, file.metadata["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from error
