"""The reference engine: autocast's semantics in Python, to be read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.library import Library

from ...plugins.backend import Backend
from ...policy.cast_policy import CastPolicy
from ...policy.schemas import find_op
from ..casting import tensors_in
from ..kernels import Kernels, dispatch_key
from ..recorder import Recorder
from ..unversioned_writes import COLLECTIVES, FUSED_OPTIMIZERS, WatchedOptimizers
from . import telling
from .kernels import PythonKernels
from .state_machine import PythonStateMachine
from .store import note_writes

_WHERE_VERSIONS_COUNT = "ADInplaceOrView"


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"
    origin = ""

    def __init__(self) -> None:
        super().__init__()
        self._optimizers: WatchedOptimizers | None = None
        self._libraries: dict[str, Library] = {}

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Put a backend's kernels in place."""
        return PythonKernels(backend, policies, self)

    def recorder(self, all_threads: bool, timing: bool, nonfinite: int, stacks: bool) -> Recorder:
        """Return a recorder that is to be started: the native engine's, which sees the ops of any engine.

        Raises:
            RuntimeError: it cannot be built.
        """
        return _ToldRecorder(self._native(), all_threads, timing, nonfinite, stacks)

    def enter_module(self, module: object) -> None:
        """See :class:`Engine`."""
        self._native().enter_module(module)

    def leave_module(self, module: object) -> None:
        """See :class:`Engine`."""
        self._native().leave_module(module)

    def note_compiling(self, begins: bool) -> None:
        """See :class:`Engine`."""
        self._native().note_compiling(begins)

    def _native(self) -> Any:
        from ..native import build, cache  # few observe

        try:
            return build.load()
        except cache.BuildError as error:
            raise RuntimeError(
                f"polycast.observe needs the C++ of the native engine on this one, too, and it cannot be built: {error}"
            ) from error

    def watch_writes(self) -> None:
        """Have writes of weights that count no version seen, from now on."""
        if self._optimizers is None:
            self._optimizers = WatchedOptimizers(note_writes)
            for name in (*FUSED_OPTIMIZERS, *COLLECTIVES):
                op = find_op(name)
                if op is None or torch._C._dispatch_has_kernel_for_dispatch_key(name, _WHERE_VERSIONS_COUNT):
                    continue  # not in this torch; or it counts versions by now
                space, _, name_in_it = name.partition("::")
                if space not in self._libraries:
                    self._libraries[space] = Library(space, "IMPL")  # type: ignore[no-untyped-call]
                self._libraries[space].impl(  # type: ignore[no-untyped-call]
                    name_in_it, _announcing(op, name in COLLECTIVES), _WHERE_VERSIONS_COUNT, with_keyset=True
                )

    def unwatch_writes(self) -> None:
        """Take out of torch what watch_writes put there."""
        if self._optimizers is not None:
            self._optimizers.remove()
            self._optimizers = None
            for library in self._libraries.values():
                library._destroy()  # type: ignore[no-untyped-call]
            self._libraries = {}


class _ToldRecorder:
    """A recorder of the native engine, told of what this one does."""

    def __init__(self, native: Any, *options: Any) -> None:
        self._native = native
        self._recorder: Recorder = native.recorder(*options)
        self._runs = False
        self.read = self._recorder.read
        self.nonfinite_count = self._recorder.nonfinite_count
        self.add_module = self._recorder.add_module
        self.forget_module = self._recorder.forget_module
        self.add_parameter = self._recorder.add_parameter

    def start(self) -> None:
        """See :class:`Recorder`."""
        telling.tell(self._native)
        self._runs = True
        self._recorder.start()

    def stop(self) -> None:
        """See :class:`Recorder`."""
        self._recorder.stop()
        if self._runs:
            self._runs = False
            telling.tell_no_more()


def _announcing(op: torch._ops.OpOverload, is_collective: bool) -> Any:
    """Return a kernel that runs in front of an op that writes to tensors it is given, and announces that."""
    below = torch._C._dispatch_keyset_full_after(dispatch_key(_WHERE_VERSIONS_COUNT))

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # A fused optimizer writes its first argument and its state; a collective's schema does not say what it writes.
        written = list(tensors_in(args if is_collective else args[:1]))
        try:
            return op.redispatch(keys & below, *args, **kwargs)
        finally:
            note_writes(written, may_go_on=is_collective)

    return kernel
