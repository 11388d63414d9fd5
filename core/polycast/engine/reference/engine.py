"""The reference engine: autocast's semantics in Python, to be read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.library import Library

from ...plugins.backend import Backend
from ...policy.cast_policy import CastPolicy
from ..kernels import Kernels, dispatch_key
from ..unversioned_writes import FUSED_OPTIMIZERS, WatchedOptimizers
from .kernels import PythonKernels
from .state_machine import PythonStateMachine
from .store import note_writes

_WHERE_VERSIONS_COUNT = "ADInplaceOrView"


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"

    def __init__(self) -> None:
        super().__init__()
        self._optimizers: WatchedOptimizers | None = None
        self._library: Library | None = None

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Put a backend's kernels in place."""
        return PythonKernels(backend, policies, self)

    def watch_writes(self) -> None:
        """Have writes of weights that count no version seen, from now on."""
        if self._optimizers is None:
            self._optimizers = WatchedOptimizers(note_writes)
            self._library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            for name in FUSED_OPTIMIZERS:
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _WHERE_VERSIONS_COUNT):
                    kernel = _announcing(name)
                    self._library.impl(name, kernel, _WHERE_VERSIONS_COUNT, with_keyset=True)  # type: ignore[no-untyped-call]

    def unwatch_writes(self) -> None:
        """Take out of torch what watch_writes put there."""
        if self._optimizers is not None and self._library is not None:
            self._optimizers.remove()
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._optimizers = self._library = None


def _announcing(name: str) -> Any:
    """Return a kernel that runs in front of a fused optimizer's op, whose first argument it writes."""
    packet, _, overload = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    below = torch._C._dispatch_keyset_full_after(dispatch_key(_WHERE_VERSIONS_COUNT))

    def kernel(keys: torch._C.DispatchKeySet, weights: Any, *args: Any, **kwargs: Any) -> None:
        try:
            op.redispatch(keys & below, weights, *args, **kwargs)
        finally:
            note_writes(weights)

    return kernel
