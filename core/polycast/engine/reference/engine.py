"""The reference engine: autocast's semantics in Python, to be read."""

from collections.abc import Mapping
from typing import Any

from torch.library import Library

from ...plugins.backend import Backend
from ...policy.cast_policy import CastPolicy
from ...policy.schemas import find_op
from ...torch_internals import changes
from ...torch_internals.dispatcher import (
    DispatchKeySet,
    OpOverload,
    has_kernel_for_dispatch_key,
    keys_below,
    redispatch,
)
from ..casts.unversioned_writes import COLLECTIVES, FUSED_OPTIMIZERS, WatchedWrites
from ..kernels import Kernels
from . import invalidation
from .invalidation import forget, note_writes
from .python_kernels import PythonKernels
from .rules import tensors_in
from .state_machine import PythonStateMachine

_VERSIONING_KEY = "ADInplaceOrView"


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"
    origin = ""

    def __init__(self) -> None:
        super().__init__()
        self._watched: WatchedWrites | None = None
        self._libraries: dict[str, Library] = {}

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Install a backend's kernels."""
        return PythonKernels(backend, policies, self)

    def watch_writes(self) -> None:
        """Watch for writes to weights that do not increment the version."""
        if self._watched is None:
            changes.make(changes.ALIASES)
            self._watched = WatchedWrites(note_writes, forget, invalidation)
            below = keys_below(_VERSIONING_KEY)
            for name in (*FUSED_OPTIMIZERS, *COLLECTIVES):
                op = find_op(name)
                if below is None or op is None or has_kernel_for_dispatch_key(name, _VERSIONING_KEY):
                    continue  # this torch lacks it, or increments the version
                space, _, name_in_it = name.partition("::")
                if space not in self._libraries:
                    self._libraries[space] = Library(space, "IMPL")  # type: ignore[no-untyped-call]
                self._libraries[space].impl(  # type: ignore[no-untyped-call]
                    name_in_it, _write_hook(op, below, name in COLLECTIVES), _VERSIONING_KEY, with_keyset=True
                )

    def unwatch_writes(self) -> None:
        """Undo :meth:`watch_writes`."""
        if self._watched is not None:
            changes.undo(changes.ALIASES)
            self._watched.remove()
            self._watched = None
            for library in self._libraries.values():
                library._destroy()  # type: ignore[no-untyped-call]
            self._libraries = {}


def _write_hook(op: OpOverload, below: DispatchKeySet, is_collective: bool) -> Any:
    """Return a kernel that runs before an op that writes to its arguments, and logs the write."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # A fused optimizer writes to its first argument and its state. The schemas of collectives do not say what they
        # write.
        written = list(tensors_in(args if is_collective else args[:1]))
        try:
            return redispatch(op, keys & below, args, kwargs)
        finally:
            note_writes(written, is_pending=is_collective)

    return kernel
