"""Files of tensors in the format of safetensors, written in blocks and mapped into memory when they are read.

The writer of the package aligns tensors to eight bytes. Here tensors of whole cache lines come first, aligned to
cache lines, because kernels read them at each call.
"""

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polycast.errors import library
from polycast.plugin import memory_of

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LINE = 64
"""Bytes of a cache line."""
_BLOCK = 1 << 21
"""Bytes of a huge page. Linux can map a file in huge pages where each was written in one piece."""


def can_be_written(tensor: torch.Tensor) -> bool:
    """Return whether the format has the dtype of a tensor, and the tensor is plain."""
    return tensor.layout is torch.strided and tensor.dtype in _DTYPES and not tensor.is_meta


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, replaces: bool = True
) -> None:
    """Write contiguous tensors atomically, with metadata.

    Raises:
        FileExistsError: there is a file, and `replaces` is False.
        OSError: the file cannot be written.
    """
    order = sorted(tensors, key=lambda name: _order(tensors[name]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    with _new_file(path, replaces) as new, new.open("wb", buffering=_BLOCK) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = tensors[name].cpu()  # kept while its memory is read
            rest = memory_of(tensor)
            while rest:
                room = _BLOCK - file.tell() % _BLOCK  # of this block: a longer piece would not end with it
                file.write(rest[:room])
                rest = rest[room:]


@contextlib.contextmanager
def _new_file(target: Path, replaces: bool) -> Iterator[Path]:
    """Yield the path of a new file, which becomes, or replaces, the target when the block ends without an error.

    If the target is a symbolic link, the file that it points to is replaced.

    Raises:
        OSError: the file cannot be written; the error names the target.
    """
    file = Path(os.path.realpath(target))
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as folder:
            complete = Path(folder, file.name)
            yield complete
            if replaces or not _link(complete, file):
                complete.replace(file)
    except OSError as error:
        if error.errno is None:
            raise
        # The error names the temporary file, or none if that could not be written.
        raise OSError(error.errno, error.strerror, str(target)) from error


def _link(source: Path, target: Path) -> bool:
    """Link a file that does not exist to another; return whether the file system has links.

    Raises:
        FileExistsError: it exists.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        return False
    return True


def _order(tensor: torch.Tensor) -> int:
    """Return a key that sorts tensors so that each is aligned to its elements, and the first ones to cache lines."""
    return 0 if tensor.nbytes % _LINE == 0 else 9 - tensor.element_size()


class TensorFile:
    """A file that is mapped into memory, copied on writes: its tensors share their pages with other processes.

    Attributes:
        metadata: texts by name.
        names: those of the tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file, or truncated.
    """

    def __init__(self, path: Path) -> None:
        safetensors = library("safetensors")
        if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):  # a pipe would have to be written first
            raise ValueError("it is not a regular file: only those can be mapped into memory")
        with path.open("rb"):  # the package's errors are of other classes
            pass
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
        except safetensors.SafetensorError as error:
            raise ValueError(f"it is not a complete safetensors file: {error}") from error
        self._file = file
        self.metadata: Mapping[str, str] = file.metadata() or {}
        self.names = frozenset(file.keys())

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file.

        Raises:
            ValueError: there is none of the name.
        """
        if name not in self.names:
            raise ValueError(f"it lacks the tensor {name!r}")
        found: torch.Tensor = self._file.get_tensor(name)
        return found.detach()
