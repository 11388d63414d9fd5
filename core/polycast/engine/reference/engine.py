"""The reference engine: autocast's semantics in Python, to be read."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.library import Library

from ...policy.cast_policy import CastPolicy
from ...policy.schemas import find_op
from ...registry.backend import Backend
from ...torch_internals import changes
from ...torch_internals.dispatcher import (
    DispatchKeySet,
    OpOverload,
    has_kernel_for_dispatch_key,
    keys_below,
    redispatch,
)
from ..casts.unversioned_writes import COLLECTIVES, EXPOSING_OPS, WRITING_OPS, unwatch, watch
from ..kernels import Kernels
from . import invalidation
from .invalidation import note_writes
from .python_kernels import PythonKernels
from .rules import tensors_in
from .state_machine import PythonStateMachine

_VERSIONING_KEY, _COMPOSITE_KEY = "ADInplaceOrView", "CompositeImplicitAutograd"


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"
    keeps_actions = False
    origin = ""
    build_failure = ""

    def __init__(self) -> None:
        super().__init__()
        self._is_watching = False
        self._libraries: dict[str, Library] = {}

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Install a backend's kernels."""
        return PythonKernels(backend, policies, self)

    def watch_writes(self) -> None:
        """Watch for writes to weights that do not increment the version."""
        if not self._is_watching:
            self._is_watching = True
            changes.ALIASES.make()
            watch(invalidation)
            for name in WRITING_OPS:
                self._hook(name, _writes)
            for name in (*COLLECTIVES, *EXPOSING_OPS):
                self._hook(name, lambda argument: True)

    def _hook(self, name: str, accesses: Callable[[Any], bool]) -> None:
        """Hook an op, at the key where torch counts versions, or in place of the kernel of a composite op."""
        op, below = find_op(name), keys_below(_VERSIONING_KEY)
        if op is None or below is None:
            return  # this torch lacks it
        is_composite = has_kernel_for_dispatch_key(name, _COMPOSITE_KEY)
        key = _COMPOSITE_KEY if is_composite else _VERSIONING_KEY
        original = None
        if has_kernel_for_dispatch_key(name, key):
            if not is_composite and name not in EXPOSING_OPS:
                return  # its kernel increments the version
            original = torch.library.get_kernel(op, "CPU" if is_composite else key).call_boxed
        space, _, name_in_it = name.partition("::")
        if space not in self._libraries:
            self._libraries[space] = Library(space, "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # torch warns once in a process that a kernel is overridden, which is intended here.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            hook = _write_hook(op, accesses, original, below, name, is_composite and name in EXPOSING_OPS)
            self._libraries[space].impl(name_in_it, hook, key, with_keyset=True)  # type: ignore[no-untyped-call]

    def unwatch_writes(self) -> None:
        """Undo :meth:`watch_writes`."""
        if self._is_watching:
            self._is_watching = False
            changes.ALIASES.undo()
            unwatch()
            for library in self._libraries.values():
                library._destroy()  # type: ignore[no-untyped-call]
            self._libraries = {}


def _writes(argument: Any) -> bool:
    """Return whether an op writes to an argument; the schemas of batch norms do not say so of their statistics."""
    alias: Any = argument.alias_info
    return bool(alias is not None and alias.is_write) or argument.name.startswith("running_")


def _write_hook(
    op: OpOverload,
    accesses: Callable[[Any], bool],
    original: Any,
    below: DispatchKeySet,
    name: str,
    holds_arguments: bool,
) -> Any:
    """Return a kernel that calls an op, and notes that it wrote to some of its arguments, or may do so."""
    accessed = [(place, each.name) for place, each in enumerate(op._schema.arguments) if accesses(each)]

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if holds_arguments:  # a sparse tensor would hold the weight itself, and not show in its holders
            args = tuple(torch.ops.aten.alias(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        tensors = list(tensors_in([args[place] if place < len(args) else kwargs.get(key) for place, key in accessed]))
        try:
            return original(keys, *args, **kwargs) if original else redispatch(op, keys & below, args, kwargs)
        finally:
            note_writes(tensors, is_pending=name in COLLECTIVES)

    return kernel
