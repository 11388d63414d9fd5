"""The cache of builds: where each build is, and whether it is complete and can be trusted."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from typing_extensions import Self

from .cache_folder import check_folders, others_can_write
from .compiler import FLAGS, PLATFORM, PYTHON_ABI, Compiler, checksum, first_error
from .cpp_library import BuildError, CppLibrary


@dataclass(frozen=True)
class CachedBuild:
    """A library's entry in the cache, for the running torch; it may not be built yet."""

    library: CppLibrary
    sources: Mapping[str, bytes]
    cache: Path
    folder: Path
    """The folder of one compiler's build, or the folder above those of all compilers."""
    compiler: Compiler | None = None

    @classmethod
    def locate(cls, cache: Path, library: CppLibrary) -> Self:
        """Return the entry of a library, of its builds by all compilers."""
        sources = library.read_sources()
        torch_abi = str(torch.compiled_with_cxx11_abi())
        target = (torch.__version__, PYTHON_ABI, torch_abi, PLATFORM)
        folder = cache / _digest(*target, *FLAGS, *(text.hex() for text in sources.values()))
        return cls(library, sources, cache, folder)

    def by(self, compiler: Compiler) -> Self:
        """Return the entry of the build by one compiler."""
        return replace(self, folder=self.folder / _digest(*compiler), compiler=compiler)

    @property
    def path(self) -> Path:
        """The path of the library."""
        return self.folder / f"{self.library.name}.so"

    @property
    def log(self) -> Path:
        """The path of the compiler's output, which exists if the build failed."""
        return self.path.with_suffix(".log")

    def find(self) -> Path | None:
        """Return the path of a complete build, or None.

        Raises:
            UntrustedCacheError: other users can write to the cache.
        """
        check_folders(self.cache, self.folder)
        for path in [self.path] if self.compiler else sorted(self.folder.glob(f"*/{self.path.name}")):
            check_folders(self.cache, path.parent)
            if _is_complete(path):
                return path
        return None

    def check_not_failed(self, retry: bool = False) -> None:
        """Raise BuildError if the compiler has failed before, unless `retry`."""
        if self.log.exists() and not retry:
            hint = self.library.retry_hint
            error = first_error(self._logged())
            raise BuildError(f"it failed before{error}; its output is in {self.log}. {hint[:1].upper()}{hint[1:]}.")

    def _logged(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # another process may have removed it
            return ""


def _is_complete(library: Path) -> bool:
    expected = library.with_suffix(".sha256")
    try:
        return _is_trusted(library) and _is_trusted(expected) and expected.read_text() == checksum(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _is_trusted(file: Path) -> bool:
    return file.is_file() and others_can_write(file) is None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]
