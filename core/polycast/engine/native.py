"""The native engine: reference.py's semantics in C++ kernels, at the speed of torch's own."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from typing_extensions import override

from ..backend import Backend
from ..errors import StaleWeightError
from ..policy import CastPolicy
from ..weights import STALE, CastStore
from .kernels import Kernels, refusal

# The numbers that native.cpp's enumeration Policy gives them.
_POLICIES = {policy: number for number, policy in enumerate(CastPolicy)}


class NativeEngine:
    """The engine of native.cpp, once it is built and loaded."""

    name = "native"

    def __init__(self, extension: ModuleType) -> None:
        extension.bind(StaleWeightError, STALE, [policy.name for policy in CastPolicy])
        self._extension = extension
        self._numbers: dict[str, int] = {}
        self.exchange = extension.exchange
        """See :class:`polycast.state.Engine`."""

    def number(self, name: str) -> int:
        """Return the number by which kernels and overlays know an op."""
        return self._numbers.setdefault(name, len(self._numbers))

    def overlay(self, policies: Mapping[str, CastPolicy]) -> Any:
        """Return the policies by the numbers of their ops."""
        return self._extension.Overlay({self.number(name): _POLICIES[policy] for name, policy in policies.items()})

    def new_store(self, own: bool, max_bytes: int | None = None, verify: bool = False) -> CastStore:
        """Return a store in C++."""
        store: CastStore = self._extension.Store(own, max_bytes, verify)
        return store

    def kernels(self, backend: Backend) -> Kernels:
        """Put a backend's kernels in place."""
        return _NativeKernels(backend, self, self._extension)


class _NativeKernels(Kernels):
    def __init__(self, backend: Backend, engine: NativeEngine, extension: ModuleType) -> None:
        self._engine = engine
        self._extension = extension
        self._libraries: dict[str, Any] = {}
        # Asking costs the GIL at each cast of a weight, so those that never capture are not asked.
        overridden = type(backend).is_capturing is not Backend.is_capturing or "is_capturing" in vars(backend)
        self._is_capturing = backend.is_capturing if overridden else None
        super().__init__(backend)

    def _library(self, namespace: str) -> Any:
        if namespace not in self._libraries:
            self._libraries[namespace] = self._extension.Library(namespace, self.backend.device_type, self.key)
        return self._libraries[namespace]

    @override
    def _register(self, name: str, op: torch._ops.OpOverload, policy: CastPolicy) -> None:
        self._library(name.partition("::")[0]).impl(
            name, self._engine.number(name), _POLICIES[policy], refusal(self.backend, name), self._is_capturing
        )

    @override
    def _let_other_ops_through(self) -> None:
        self._library("_").fallthrough()

    @override
    def _unregister(self) -> None:
        for library in self._libraries.values():
            library.remove()
        self._libraries = {}
