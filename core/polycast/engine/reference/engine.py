"""The reference engine: autocast's semantics in Python, to be read.

It caches nothing that a write could make stale: each use of a weight casts or prepacks it anew.
"""

from collections.abc import Mapping

from ...policy.cast_policy import CastPolicy
from ...registry.backend import Backend
from ..kernels import Kernels
from .python_kernels import PythonKernels
from .state_machine import PythonStateMachine


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"
    caches = False
    origin = ""
    build_failure = ""

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Install a backend's kernels."""
        return PythonKernels(backend, policies, self)

    def watch_writes(self) -> None:
        """Do nothing: no write makes anything stale."""

    def unwatch_writes(self) -> None:
        """Do nothing."""


REFERENCE = ReferenceEngine()
