"""`Library`: C++ sources that are compiled into one shared library."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
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
    def of_ops(cls, package: str) -> "Library":
        """Return the library of the ops that a backend's package registers."""
        return cls(package, package.replace(".", "_"), f"the ops of {package}", "remove that file to try again")
