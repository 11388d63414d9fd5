"""The reference engine: autocast's semantics in Python, to be read."""

from collections.abc import Mapping

from ...plugins.backend import Backend
from ...policy.cast_policy import CastPolicy
from ..kernels import Kernels
from .kernels import PythonKernels
from .state_machine import PythonStateMachine


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Put a backend's kernels in place."""
        return PythonKernels(backend, policies, self)
