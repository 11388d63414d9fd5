"""The C++ libraries of this machine: the native engine, those of plugins, and the ops of backends."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from polycast import backends
from polycast.plugin import NativeLibrary, manifests

Library: TypeAlias = Any
"""A :class:`polycast.plugin.NativeLibrary`, or what its `of_engine` and `of_ops` return."""


def common_libraries(problems: list[str] | None = None) -> list[Library]:
    """Return the libraries that are the same for all devices: the native engine and those of plugins.

    Args:
        problems: gets a sentence for each library that cannot be imported, which is left out.

    Raises:
        RuntimeError: one cannot be imported, and `problems` is None.
    """
    found: list[Library] = [NativeLibrary.of_engine()]
    for each in manifests():
        for path in each.plugin.libraries:
            try:
                found.append(each.resolve(path))
            except RuntimeError as error:
                if problems is None:
                    raise
                problems.append(str(error))
    return found


def libraries(problems: list[str] | None = None) -> list[Library]:
    """Return all libraries for this machine; see :func:`packages_of_ops` and :func:`common_libraries`."""
    return [*common_libraries(problems), *map(NativeLibrary.of_ops, packages_of_ops())]


def packages_of_ops(state: str = "ready") -> Mapping[str, str]:
    """Return the packages with C++ ops of the devices in a state, and the device type of each.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value.
    """
    statuses = [each for each in backends().values() if each.state == state]
    return {package: each.device_type for each in statuses for package in each.ops_in_cpp}


def origins() -> Mapping[str, str]:
    """Return where the ops of each package come from; raises as :func:`packages_of_ops` does."""
    return {package: _origin(NativeLibrary.of_ops(package)) for package in packages_of_ops()}


def _origin(library: Library) -> str:
    try:
        return library.find() or "not compiled yet, as `polycast build` does"
    except (RuntimeError, OSError) as error:
        return f"none: {error}"
