"""Ops that a backend has in C++: built, kept and checked as the native engine is, and loaded into torch.

A backend names their packages in its `ops_in_cpp`, so that they can be built ahead of their first use.
"""

import tempfile
import threading
from pathlib import Path

import torch

from ..common.atfork import hold_during_fork
from ..errors import warn_user
from ..plugins.backend import Availability
from . import build, prebuilt
from .build import find_build, find_or_build
from .build_cache import BuildError, UntrustedCacheError, cache_directory
from .library import Library

_one_at_a_time = threading.RLock()
hold_during_fork(lambda: [_one_at_a_time])
_answers: dict[str, Availability] = {}
"""What was found of each package."""
_origins: dict[str, str] = {}
"""Where what is loaded came from, by package."""


def load_ops(package: str) -> Availability:
    """Build the C++ in a package, unless it was built before for this torch, and load the ops that it registers.

    The package has ``.cpp`` and ``.h`` files, which register ops with ``TORCH_LIBRARY`` and need no Python. They are
    compiled where the native engine is, without options for a processor: a function that needs its instructions says so
    as its target. They may include ``parallel.h``, for loops over torch's own threads. A failure is an answer, for the
    backend to pass on.

    Args:
        package: the name of the package, such as ``"polycast_cpu.native"``.

    Returns:
        Whether the ops are there and, if not, why.

    Warns:
        UserWarning: the cache of builds cannot be trusted, so that it was built for this process alone.

    Example:
        >>> import polycast
        >>> polycast.load_ops("polycast.policy").available  # there is no C++ in it
        False
    """
    answer = _answers.get(package)
    if answer is None:
        failure = build.compile_ahead(Library.of_ops(package))
        with _one_at_a_time:  # ops can be registered once
            answer = _answers.get(package)
            if answer is None:
                answer = _answers[package] = _load(package, failure)
    return answer


def _load(package: str, failure: Exception | None) -> Availability:
    library = Library.of_ops(package)
    try:
        if failure is not None:
            raise failure
        beforehand = prebuilt.find(library)
        if beforehand is not None and _registers(beforehand):
            _origins[package] = prebuilt.origin(beforehand)
            return Availability(True)
        try:
            built = find_or_build(cache_directory(), library)
            _register(built)
            _origins[package] = build.origin(built)
        except UntrustedCacheError as refusal:
            with tempfile.TemporaryDirectory(prefix="polycast-") as private:
                _register(find_or_build(Path(private), library))
            _origins[package] = "compiled here, for this process alone"
            warn_user(f"polycast built the ops of {package} for this process alone, as each process will: {refusal}")
    except TimeoutError:  # from the user's signal handler
        raise
    except (BuildError, OSError) as error:
        return Availability(False, f"the C++ of {package} cannot be had: {error}")
    return Availability(True)


def origin(package: str) -> str:
    """Say where the ops of a package came from or, where they are not loaded, would come from; compiles nothing."""
    if package in _origins:
        return _origins[package]
    library = Library.of_ops(package)
    try:
        beforehand = prebuilt.find(library)
        if beforehand is not None:
            return prebuilt.origin(beforehand)
        built = find_build(cache_directory(), library)
    except (BuildError, OSError) as error:
        return f"none: {error}"
    return "not compiled yet, as `polycast build` does" if built is None else build.origin(built)


def _register(library: Path) -> None:
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def _registers(library: Path) -> bool:
    try:
        _register(library)
    except OSError:  # it asks for a newer libc than there is here, say
        return False
    return True
