"""Load the ops that a backend's package has in C++."""

import threading
from pathlib import Path

import torch

from ..common.atfork import hold_during_fork
from ..errors import raise_if_callers
from ..registry.backend import Availability
from .cpp_library import BuildError
from .load import BuildableLibrary, load, try_build

_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_answers: dict[str, Availability] = {}
"""By package."""


def load_ops(package: str) -> Availability:
    """Build the C++ in a package, unless it is built already for this torch, and load the ops that it registers.

    The package contains ``.cpp`` and ``.h`` files, which register ops with ``TORCH_LIBRARY`` and need no Python. They
    are compiled by the compiler of the native engine, without options for a processor: a function that needs certain
    instructions declares them as its target, and products are fused with sums only where it says so. They may include
    ``parallel.h``, for loops over torch's threads, and ``huge_pages.h``, for weights. A failure is
    returned, for the backend to pass on.

    Args:
        package: the name of the package, such as ``"polycast_plugins.quantize.cpu.native"``.

    Returns:
        Whether the ops are loaded and, if not, why.

    Warns:
        UserWarning: other users can write to the cache of builds, so the ops were built for this process alone.

    Example:
        >>> import polycast
        >>> polycast.plugin.load_ops("polycast.policy").available  # it contains no C++
        False
    """
    answer = _answers.get(package)
    if answer is None:
        failure = try_build(BuildableLibrary.of_ops(package))
        with _lock:  # an op can be registered once
            answer = _answers.get(package)
            if answer is None:
                answer = _answers[package] = _load(package, failure)
    return answer


def _load(package: str, failure: Exception | None) -> Availability:
    library = BuildableLibrary.of_ops(package)
    try:
        if failure is not None:
            raise failure
        load(library, _register)
    except (BuildError, OSError) as error:
        raise_if_callers(error)
        return Availability(False, f"the C++ of {package} cannot be loaded: {error}")
    return Availability(True)


def _register(path: Path) -> None:
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
