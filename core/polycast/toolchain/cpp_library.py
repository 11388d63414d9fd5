"""`CppLibrary`: C++ sources that are compiled into one shared library."""

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

_SHARED_HEADERS = "include"
_OWN_SOURCES_HINT = "Install polycast with all its files."


class BuildError(RuntimeError):
    """A C++ library cannot be built or loaded. The text gives the reason, the remedy and the log, if any."""


@dataclass(frozen=True)
class CppLibrary:
    """C++ sources in a package, compiled into one shared library.

    Attributes:
        package: the package that contains the sources.
        name: the file name of the library, without its suffix.
        description: what messages call it, such as ``"the native engine"``.
        retry_hint: how to repeat a failed build, as the end of a sentence.
        folders: the folders that contain the sources: of the package, or of another as ``package:folder``. They are
            compiled as if they were one folder, together with :file:`toolchain/include`.
        sources_hint: what to do if the sources are missing, as a sentence.
        uses_excerpts: whether it is compiled with excerpts in place of some of torch's headers.
    """

    package: str
    name: str
    description: str
    retry_hint: str = "`polycast build` tries again"
    folders: tuple[str, ...] = (".",)
    sources_hint: str = _OWN_SOURCES_HINT
    uses_excerpts: bool = True

    def read_sources(self) -> Mapping[str, bytes]:
        """Return the sources by file name. The package may be inside an archive.

        A header of the package hides one of the same name in :file:`toolchain/include`.

        Raises:
            BuildError: the sources are not installed.
        """
        sources: dict[str, bytes] = {}
        for name in self.folders:
            other, _, path = name.rpartition(":")
            try:
                package = importlib.resources.files(other or self.package)
            except ModuleNotFoundError as error:
                raise BuildError(
                    f"there is no package {other or self.package} with its C++ sources: {error}."
                ) from error
            folder = package if path == "." else package / path
            found = _read(folder)
            if not found:
                raise BuildError(f"its C++ sources are not in {folder}. {self.sources_hint}")
            sources = found | sources
        if not any(name.endswith(".cpp") for name in sources):
            raise BuildError(f"there are headers and no .cpp file in {self.package}. {self.sources_hint}")
        shared = _read(importlib.resources.files(__package__) / _SHARED_HEADERS)
        if not shared:
            raise BuildError(f"the headers of {__package__} are missing. {_OWN_SOURCES_HINT}")
        return dict(sorted((shared | sources).items()))


def _read(folder: "Traversable") -> dict[str, bytes]:
    """Return the C++ files in a folder by name; none if there is no such folder."""
    try:
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".cpp", ".h"))}
    except OSError:
        return {}
