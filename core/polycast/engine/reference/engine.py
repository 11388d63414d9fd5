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
from .invalidation import forget, note_writes
from .kernels import PythonKernels
from .rules import tensors_in
from .state_machine import PythonStateMachine

_WHERE_VERSIONS_COUNT = "ADInplaceOrView"


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"
    origin = ""

    def __init__(self) -> None:
        super().__init__()
        self._watched: WatchedWrites | None = None
        self._libraries: dict[str, Library] = {}

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Put a backend's kernels in place."""
        return PythonKernels(backend, policies, self)

    def watch_writes(self) -> None:
        """Have writes of weights that count no version seen, from now on."""
        if self._watched is None:
            changes.make(changes.ALIASES)
            self._watched = WatchedWrites(note_writes, forget)
            below = keys_below(_WHERE_VERSIONS_COUNT)
            for name in (*FUSED_OPTIMIZERS, *COLLECTIVES):
                op = find_op(name)
                if below is None or op is None or has_kernel_for_dispatch_key(name, _WHERE_VERSIONS_COUNT):
                    continue  # not in this torch; or it counts versions by now
                space, _, name_in_it = name.partition("::")
                if space not in self._libraries:
                    self._libraries[space] = Library(space, "IMPL")  # type: ignore[no-untyped-call]
                self._libraries[space].impl(  # type: ignore[no-untyped-call]
                    name_in_it, _announcing(op, below, name in COLLECTIVES), _WHERE_VERSIONS_COUNT, with_keyset=True
                )

    def unwatch_writes(self) -> None:
        """Take out of torch what watch_writes put there."""
        if self._watched is not None:
            changes.undo(changes.ALIASES)
            self._watched.remove()
            self._watched = None
            for library in self._libraries.values():
                library._destroy()  # type: ignore[no-untyped-call]
            self._libraries = {}


def _announcing(op: OpOverload, below: DispatchKeySet, is_collective: bool) -> Any:
    """Return a kernel that runs in front of an op that writes to tensors it is given, and announces that."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # A fused optimizer writes its first argument and its state; a collective's schema does not say what it writes.
        written = list(tensors_in(args if is_collective else args[:1]))
        try:
            return redispatch(op, keys & below, args, kwargs)
        finally:
            note_writes(written, is_pending=is_collective)

    return kernel
