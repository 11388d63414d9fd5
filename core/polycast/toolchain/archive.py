"""Archives of prebuilt libraries: all builds of one library, for each version of torch, compressed as one.

The builds for two versions of torch differ in little more than offsets. Compressed together, each takes a quarter of
what it would take alone. Beside the archive is an index of the checksums, so that looking for a build reads no archive.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .cpp_library import BuildError

_SUFFIX = ".tar.xz"
_READ_ERRORS = (OSError, EOFError, ImportError, ValueError, KeyError, tarfile.TarError)
"""Exceptions of damaged archives. ImportError: this Python was built without lzma."""


@dataclass(frozen=True)
class Archive:
    """The builds of one library, each under a key."""

    folder: Path
    name: str
    """The name of the library."""

    @property
    def path(self) -> Path:
        """The path of the archive."""
        return self.folder / f"{self.name}{_SUFFIX}"

    def checksums(self) -> Mapping[str, str]:
        """Return the checksum of each build by key; none if there is no archive."""
        try:
            return dict(json.loads((self.folder / f"{self.name}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def headers(self, key: str) -> list[str]:
        """Return the digest and the names of the headers that a build was compiled from.

        Raises:
            BuildError: the archive is damaged.
        """
        return self._read(f"{key}.headers").decode().split()

    def unpack(self, key: str, folder: Path) -> Path:
        """Write a build to a folder, and return its path.

        Raises:
            BuildError: the archive is damaged.
            OSError: the folder cannot be written.
        """
        content = self._read(f"{key}.so")
        if hashlib.sha256(content).hexdigest() != self.checksums().get(key):
            raise BuildError(f"{self.path} is damaged. Install polycast again.")
        path = folder / f"{self.name}.so"
        path.write_bytes(content)
        return path

    def _read(self, member: str) -> bytes:
        # As a stream: a file that is opened at random is decompressed to its end first.
        try:
            with tarfile.open(self.path, "r|xz") as archive:
                for each in archive:
                    if each.name == member and (file := archive.extractfile(each)) is not None:
                        return file.read()
        except _READ_ERRORS as error:
            raise BuildError(f"{self.path} cannot be read: {error}") from error
        raise BuildError(f"{self.path} is damaged. Install polycast again.")


def archives_in(folder: Path) -> list[Archive]:
    """Return the archives in a folder."""
    return [Archive(folder, path.name.removesuffix(_SUFFIX)) for path in sorted(folder.glob(f"*{_SUFFIX}"))]


def pack(builds: Path) -> Iterator[tuple[str, bytes]]:
    """Return archives and their indices by file name.

    Args:
        builds: a folder that :func:`~polycast.toolchain.prebuilt.build_prebuilt` has filled.
    """
    for name in sorted({path.stem for path in builds.glob("*/*.so")}):
        built = {path.parent.name: path for path in sorted(builds.glob(f"*/{name}.so"))}
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:xz", preset=9) as archive:
            for suffix in (".headers", ".so"):  # the lists first, which are read without what follows
                for key, path in built.items():
                    _add(archive, f"{key}{suffix}", path.with_suffix(suffix).read_bytes())
        yield f"{name}{_SUFFIX}", content.getvalue()
        checksums = {key: hashlib.sha256(path.read_bytes()).hexdigest() for key, path in built.items()}
        yield f"{name}.json", json.dumps(checksums, indent=1).encode()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
