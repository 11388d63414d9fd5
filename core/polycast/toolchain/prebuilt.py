"""Prebuilt libraries, which come with the package for each version of torch that a wheel supports.

A library fits if it was built from the installed sources for the running version of torch: the layouts in torch's
headers differ between versions, but not between the builds of one version, for the CPU and for each CUDA. It also fits
another patch release if the headers that it was compiled from are the same there. It serves every Python that has the
limited API.

The builds of one library for all versions of torch are in one archive: they differ in little more than offsets, and
compressed together, each takes a quarter of what it would take alone. Beside it is an index of their checksums, so that
looking for a build reads no archive. A library is unpacked into the cache of builds, once for each user.
"""

import fnmatch
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from .cache_folder import check_folders, make_folders, others_can_write
from .compiler import PLATFORM, PYTHON_ABI, Compiler, checksum, digest_of_headers, find_compiler
from .cpp_library import BuildError, CppLibrary

_FOLDER = Path(__file__).parent / "prebuilt"
_OFFICIAL_VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:\+(?:cpu|cu\d+))?")
"""A version of torch as its own builds have it."""
_BUILT_FOR = re.compile(r"torch-(\d+\.\d+\.\d+)-")
"""The beginning of a key."""
_unloadable: dict[Path, str] = {}
"""Why prebuilt libraries do not load on this machine, by archive."""


@dataclass(frozen=True)
class Prebuilt:
    """A build for the running torch, by its key in an archive."""

    archive: Path
    key: str
    checksum: str

    @property
    def name(self) -> str:
        """The file name of the library."""
        return self.archive.name.replace(".tar.xz", ".so")

    def unpack_into(self, cache: Path) -> Path:
        """Unpack it into a folder of the cache, unless it is there, and return its path.

        Raises:
            UntrustedCacheError: other users can write to the cache.
            BuildError: the archive is damaged.
            OSError: the cache cannot be written.
        """
        folder = cache / "prebuilt" / self.checksum[:16]
        path = folder / self.name
        check_folders(cache, folder)
        if not self._is_unpacked_to(path):
            make_folders(cache, folder)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                unpacked = self.unpack(Path(scratch))
                unpacked.chmod(0o600)
                os.replace(unpacked, path)  # another process may do the same
        return path

    def _is_unpacked_to(self, path: Path) -> bool:
        return path.is_file() and others_can_write(path) is None and checksum(path) == self.checksum

    def unpack(self, folder: Path) -> Path:
        """Write it to a folder, and return its path; raises as :meth:`unpack_into`."""
        content = _read(self.archive, f"{self.key}.so")
        if hashlib.sha256(content).hexdigest() != self.checksum:
            raise BuildError(f"{self.archive} is damaged. Install polycast again.")
        path = folder / self.name
        path.write_bytes(content)
        return path

    def note_unloadable(self, error: Exception) -> None:
        """Keep the reason why it does not load, for :func:`no_compiler`."""
        _unloadable[self.archive] = f"{type(error).__name__}: {error}"


def _read(archive: Path, member: str) -> bytes:
    import tarfile  # slow to import, and in a source tree there are no archives

    try:
        # As a stream: a file that is opened at random is decompressed to its end first.
        with tarfile.open(archive, "r|xz") as opened:
            for each in opened:
                if each.name == member and (file := opened.extractfile(each)) is not None:
                    return file.read()
    except (OSError, EOFError, ImportError, ValueError, KeyError, tarfile.TarError) as error:
        # ImportError: this Python was built without lzma
        raise BuildError(f"{archive} cannot be read: {error}") from error
    raise BuildError(f"{archive} is damaged. Install polycast again.")


def _checksums(archive: Path) -> Mapping[str, str]:
    """Return the checksum of each build by key; none if there is no archive."""
    try:
        index = archive.with_name(archive.name.replace(".tar.xz", ".json"))
        return dict(json.loads(index.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def find_prebuilt(library: CppLibrary) -> Prebuilt | None:
    """Return the prebuilt library that fits, or None."""
    archive = _FOLDER / f"{library.name}.tar.xz"
    checksums = _checksums(archive)
    if not checksums:  # as in a source tree
        return None
    sources = library.read_sources()
    key = key_of(sources)
    if key is None:
        return None
    if key not in checksums:
        of_any_patch = key_of(sources, any_patch=True)
        others = (other for other in sorted(checksums) if fnmatch.fnmatchcase(other, str(of_any_patch)))
        key = next((other for other in others if _has_the_headers(archive, other)), None)
    return None if key is None else Prebuilt(archive, key, checksums[key])


@functools.cache
def _has_the_headers(archive: Path, key: str) -> bool:
    """Return whether the headers that a build was compiled from are those of the installed torch."""
    try:
        digest, *headers = _read(archive, f"{key}.headers").decode().split()
    except (BuildError, ValueError):
        return False
    return digest_of_headers(headers) == digest


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
    keys = {key for archive in _FOLDER.glob("*.tar.xz") for key in _checksums(archive)}
    versions = {match[1] for key in keys if (match := _BUILT_FOR.match(key))}
    unloadable = [reason for archive, reason in _unloadable.items() if archive.parent == _FOLDER]
    if unloadable:
        prebuilt = f"a library that came with polycast does not load here ({unloadable[0]})"
    elif versions:
        known = ", ".join(sorted(versions, key=TorchVersion))
        prebuilt = f"the libraries that came with polycast are for torch {known}, and this is torch {torch.__version__}"
    else:
        prebuilt = "polycast came without compiled libraries, which its wheels for Linux contain"
    return BuildError(
        f"no C++ compiler is found, and {prebuilt}. Install a compiler (c++; on Debian: apt install g++), or name "
        f"it in the variable CXX{f', which is {name} now' if (name := os.environ.get('CXX')) else ''}."
    )


def key_of(sources: Mapping[str, bytes], any_patch: bool = False) -> str | None:
    """Return a key of torch's version, the platform and the sources; None if no prebuilt library can fit.

    With `any_patch`, return a pattern of the keys of all patch releases.
    """
    version = _OFFICIAL_VERSION.fullmatch(str(torch.__version__))
    if version is None or PYTHON_ABI != "abi3" or not torch.compiled_with_cxx11_abi():
        return None
    source = hashlib.sha256(b"\0".join(part for name, text in sources.items() for part in (name.encode(), text)))
    release = f"{version[1].rpartition('.')[0]}.*" if any_patch else version[1]
    return f"torch-{release}-{PLATFORM}-{source.hexdigest()[:16]}"
