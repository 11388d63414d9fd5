"""The cache of builds: where each build is, and whether it is complete and can be trusted."""

import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import Self

from .cache_folder import check_folders, others_can_write
from .compiler import FLAGS, PYTHON_ABI, Compiler, checksum, find_compiler, first_error
from .cpp_library import BuildError, CppLibrary
from .prebuilt import no_compiler


@dataclass(frozen=True)
class CachedBuild:
    """A library's entry in the cache, for the running torch and the installed compiler; it may not be built yet."""

    library: CppLibrary
    sources: Mapping[str, bytes]
    compiler: Compiler | None
    cache: Path
    folder: Path
    """The folder of this compiler's build; without a compiler, the folder above those of all compilers."""

    @classmethod
    def locate(cls, cache: Path, library: CppLibrary) -> Self:
        """Return the entry of a library."""
        sources = library.read_sources()
        torch_abi = str(torch.compiled_with_cxx11_abi())
        target = (torch.__version__, PYTHON_ABI, torch_abi, sysconfig.get_platform())
        folder = cache / _digest(*target, *(text.hex() for text in sources.values()))
        compiler = find_compiler()
        if compiler is not None:
            folder /= _digest(*compiler, *FLAGS)
        return cls(library, sources, compiler, cache, folder)

    @property
    def path(self) -> Path:
        """The path of the library."""
        return self.folder / f"{self.library.name}.so"

    @property
    def log(self) -> Path:
        """The path of the compiler's output, which exists if the build failed."""
        return self.path.with_suffix(".log")

    def find(self) -> Path | None:
        """Return the path of a complete build; without a compiler, of any compiler's build.

        Raises:
            UntrustedCacheError: other users can write to the cache.
        """
        check_folders(self.cache, self.folder)
        for path in [self.path] if self.compiler else sorted(self.folder.glob(f"*/{self.path.name}")):
            check_folders(self.cache, path.parent)
            if _is_complete(path):
                return path
        return None

    def check_buildable(self, retry: bool = False) -> None:
        """Check that there is a compiler and, unless `retry`, that it has not failed before.

        Raises:
            BuildError: the build is not to be tried.
        """
        if self.compiler is None:
            raise no_compiler()
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
