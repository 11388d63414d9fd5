"""Prebuilt libraries, which come with the package for each version of torch that a wheel supports.

A library fits if it was built from the installed sources for the running version of torch: the layouts in torch's
headers differ between versions, but not between the builds of one version, for the CPU and for each CUDA. It also fits
another patch release if the headers that it was compiled from are the same there. It serves every Python that has the
limited API. It is unpacked from an archive into the cache of builds, once for each user.
"""

import fnmatch
import functools
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.torch_version import TorchVersion

from .cache_folder import check_folders, make_folders, others_can_write
from .compiler import (
    PLATFORM,
    PYTHON_ABI,
    Compiler,
    checksum,
    compile_library,
    digest_of_headers,
    find_compiler,
    headers_of_torch,
)
from .cpp_library import BuildError, CppLibrary

if TYPE_CHECKING:
    from .archive import Archive

_FOLDER = Path(__file__).parent / "prebuilt"
# keep the files small
_LINKER_FLAGS = ("-s", "-Wl,--gc-sections", "-Wl,-z,noseparate-code") if sys.platform == "linux" else ()
_OFFICIAL_VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:\+(?:cpu|cu\d+))?")
"""A version of torch as its own builds have it."""
_BUILT_FOR = re.compile(r"torch-(\d+\.\d+\.\d+)-")
"""The beginning of a key."""


@dataclass(frozen=True)
class Prebuilt:
    """A library in an archive, built for the running torch."""

    archive: "Archive"
    key: str
    checksum: str

    def unpack_into(self, cache: Path) -> Path:
        """Unpack it into a folder of the cache, unless it is there, and return its path.

        Raises:
            UntrustedCacheError: other users can write to the cache.
            BuildError: the archive is damaged.
            OSError: the cache cannot be written.
        """
        folder = cache / "prebuilt" / self.checksum[:16]
        path = folder / f"{self.archive.name}.so"
        check_folders(cache, folder)
        if not self._is_unpacked_to(path):
            make_folders(cache, folder)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                unpacked = self.archive.unpack(self.key, Path(scratch))
                unpacked.chmod(0o600)
                os.replace(unpacked, path)  # another process may do the same
        return path

    def _is_unpacked_to(self, path: Path) -> bool:
        return path.is_file() and others_can_write(path) is None and checksum(path) == self.checksum


def find_prebuilt(library: CppLibrary) -> Prebuilt | None:
    """Return the prebuilt library that fits, or None."""
    if not _FOLDER.is_dir():  # as in a source tree
        return None
    from .archive import Archive

    archive = Archive(_FOLDER, library.name)
    checksums = archive.checksums()
    if not checksums:
        return None
    sources = library.read_sources()
    key = _key(sources)
    if key is None:
        return None
    if key not in checksums:
        of_any_patch = _key(sources, any_patch=True)
        others = (other for other in sorted(checksums) if fnmatch.fnmatchcase(other, str(of_any_patch)))
        key = next((other for other in others if _has_the_headers(archive, other)), None)
    return None if key is None else Prebuilt(archive, key, checksums[key])


@functools.cache
def _has_the_headers(archive: "Archive", key: str) -> bool:
    """Return whether the headers that a build was compiled from are those of the installed torch."""
    try:
        digest, *headers = archive.headers(key)
    except (BuildError, ValueError):
        return False
    return digest_of_headers(headers) == digest


_unloadable: "dict[Archive, str]" = {}
"""Why prebuilt libraries do not load on this machine."""


def note_unloadable(prebuilt: Prebuilt, error: Exception) -> None:
    """Keep the reason why a prebuilt library does not load, for :func:`no_compiler`."""
    _unloadable[prebuilt.archive] = f"{type(error).__name__}: {error}"


def require_compiler() -> Compiler:
    """Return the C++ compiler.

    Raises:
        BuildError: there is none, or the one that CXX names cannot be run.
    """
    compiler = find_compiler()
    if compiler is None:
        raise no_compiler()
    return compiler


def no_compiler() -> BuildError:
    """Return the error that there is no C++ compiler, and no prebuilt library for the running torch."""
    from .archive import archives_in

    keys = {key for archive in archives_in(_FOLDER) for key in archive.checksums()}
    versions = {match[1] for key in keys if (match := _BUILT_FOR.match(key))}
    unloadable = [reason for archive, reason in _unloadable.items() if archive.folder == _FOLDER]
    if unloadable:
        prebuilt = f"a library that came with polycast does not load here ({unloadable[0]})"
    elif versions:
        known = ", ".join(sorted(versions, key=TorchVersion))
        prebuilt = f"the libraries that came with polycast are for torch {known}, and this is torch {torch.__version__}"
    else:
        prebuilt = "polycast came without compiled libraries, which its wheels for Linux contain"
    return BuildError(
        f"no C++ compiler is found, and {prebuilt}. Install a compiler (c++; on Debian: apt install g++), or name "
        "it in the variable CXX."
    )


def build_prebuilt(folder: Path, library: CppLibrary) -> Path:
    """Build a library for the running torch, in a subfolder named by its key, for :func:`.archive.pack`.

    Raises:
        BuildError: it cannot be built, or would fit no other build of this torch.
    """
    sources = library.read_sources()
    key = _key(sources)
    if key is None:
        raise BuildError(f"libraries are not prebuilt for torch {torch.__version__} on this Python.")
    compiler = require_compiler()
    path = folder / key / f"{library.name}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        compiled = Path(scratch) / path.name
        status, output = compile_library(compiler, library, sources, compiled, _LINKER_FLAGS)
        if status != 0:
            raise BuildError(f"the compiler failed with status {status}: {output}")
        path.write_bytes(compiled.read_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        headers = headers_of_torch(compiler, library, sources, Path(scratch))
    path.with_suffix(".headers").write_text("\n".join([digest_of_headers(headers), *headers]))
    return path


def _key(sources: Mapping[str, bytes], any_patch: bool = False) -> str | None:
    """Return a key of torch's version, the platform and the sources; None if no prebuilt library can fit.

    With `any_patch`, return a pattern of the keys of all patch releases.
    """
    version = _OFFICIAL_VERSION.fullmatch(str(torch.__version__))
    if version is None or PYTHON_ABI != "abi3" or not torch.compiled_with_cxx11_abi():
        return None
    source = hashlib.sha256(b"\0".join(part for name, text in sources.items() for part in (name.encode(), text)))
    release = f"{version[1].rpartition('.')[0]}.*" if any_patch else version[1]
    return f"torch-{release}-{PLATFORM}-{source.hexdigest()[:16]}"
