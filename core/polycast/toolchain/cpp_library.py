"""`CppLibrary`: C++ sources that are compiled into one shared library."""

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass

_SHARED_HEADERS = "include"


class BuildError(Exception):
    """A C++ library cannot be built or loaded. The text gives the reason, the remedy and the log, if any."""


@dataclass(frozen=True)
class CppLibrary:
    """C++ sources in a package, compiled into one shared library.

    Attributes:
        package: the package that contains the sources.
        name: the file name of the library, without its suffix.
        description: what messages call it, such as ``"the native engine"``.
        retry_hint: how to repeat a failed build, as the end of a sentence.
        folders: the folders of the package that contain the sources. They are compiled as if they were one folder,
            together with :file:`toolchain/include`.
    """

    package: str
    name: str
    description: str
    retry_hint: str
    folders: tuple[str, ...] = (".",)

    @classmethod
    def of_ops(cls, package: str) -> "CppLibrary":
        """Return the library of the ops that a backend's package registers."""
        return cls(package, package.replace(".", "_"), f"the ops of {package}", "remove that file to try again")

    def read_sources(self) -> Mapping[str, bytes]:
        """Return the sources by file name. The package may be inside an archive.

        A header of the package hides one of the same name in :file:`toolchain/include`.

        Raises:
            BuildError: the sources are not installed.
        """
        try:
            package = importlib.resources.files(self.package)
        except ModuleNotFoundError as error:
            raise BuildError(f"there is no package {self.package} with its C++ sources: {error}.") from error
        folders = [package if name == "." else package / name for name in self.folders]
        sources: dict[str, bytes] = {}
        for folder in (*folders, importlib.resources.files(__package__) / _SHARED_HEADERS):
            try:
                files = {
                    file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".cpp", ".h"))
                }
            except OSError:
                files = {}
            if not files:
                raise BuildError(f"its C++ sources are not in {folder}. Install polycast with all its files.")
            sources = files | sources
        return dict(sorted(sources.items()))
