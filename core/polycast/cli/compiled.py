"""What is compiled on this machine: the native engine, and the ops that the backends of its devices have in C++."""

from collections.abc import Mapping

from ..engine.native.loading import ENGINE
from ..observer.loading import OBSERVER
from ..plugins.registry import backends, get_backend
from ..toolchain.cpp_library import CppLibrary
from ..toolchain.load_ops import origin

OWN = (ENGINE, OBSERVER)
"""What polycast itself has in C++."""


def libraries() -> list[CppLibrary]:
    """Return what would be compiled here, in time; raises as :func:`packages_of_ops` does."""
    return [*OWN, *map(CppLibrary.of_ops, packages_of_ops())]


def packages_of_ops(state: str = "ready") -> Mapping[str, str]:
    """Return the packages whose C++ the backends in a state have compiled, each with the device type that it is for.

    Raises:
        ValueError: a ``POLYCAST_`` variable has a value that is not legal.
    """
    devices = [name for name, status in backends().items() if status.state == state]
    return {package: name for name in devices for package in get_backend(name).ops_in_cpp}


def origins() -> Mapping[str, str]:
    """Return where the ops of each package came from, or would; raises as :func:`packages_of_ops` does."""
    return {package: origin(package) for package in packages_of_ops()}
