"""The kernels of one backend at its device's Autocast dispatch key: which there are, and putting them in place."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ..common.atfork import hold_during_fork
from ..errors import InvalidBackendError
from ..plugins.backend import Backend
from ..policy.cast_policy import CastPolicy
from ..policy.schemas import find_op
from ..policy.validation import entry_problem
from ..torch_internals.dispatcher import (
    OpOverload,
    clear_dispatch_cache,
    dispatch_key,
    dispatch_key_for_device,
    has_backend_fallback,
    has_kernel,
    has_kernel_for_dispatch_key,
    python_kernels,
)
from .casts import cached_cast

_lock = threading.Lock()
hold_during_fork(lambda: [_lock])


def autocast_key(device_type: str) -> str:
    """Return the name of a device's Autocast dispatch key."""
    return "Autocast" + dispatch_key_for_device(device_type)


def refusal(backend: Backend, name: str) -> str:
    """Return what a banned op says when it is called."""
    remedy = backend.remedies.get(name, "Call it in a region with enabled=False, on float32 inputs.")
    return f"{name} is unsafe to autocast on {backend.device_type}. {remedy}"


class Kernels(ABC):
    """The kernels of one backend, in place from construction until :meth:`remove`."""

    def __init__(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> None:
        self.backend = backend
        self.key = autocast_key(backend.device_type)
        self.ops: frozenset[str] = frozenset()
        """The ops that have a kernel here, by their names in the dispatcher."""
        self.added: frozenset[str] = frozenset()
        """Those of them that torch itself has none for."""
        self.pending: frozenset[str] = frozenset()
        """The ops that are to have a kernel and are not there, in namespaces that another library may add to."""
        self._policies = policies
        self._uppermost: dict[str, tuple[OpOverload, CastPolicy | None]] = {}
        self._displaced: list[tuple[OpOverload, Any]] = []
        try:
            # Ops that are not in the table pass by the key. torch sees to it for the devices that it has tables for.
            if not has_backend_fallback(self.key):
                self._let_other_ops_pass()
            self._serve_cached_casts()
            cached_cast.look_up_anew()
            for name, policy in policies.items():
                self.add(name, policy)
        except BaseException:
            self.remove()
            raise
        self.pending = frozenset(name for name in policies if name not in self.ops and not name.startswith("aten::"))

    def add(self, name: str, policy: CastPolicy | None, *, replace: bool = False) -> None:
        """Put a kernel for one op in place, unless the running torch lacks the op, or there is one and not `over`.

        With a policy of None the op runs as if it had no kernel, save in regions whose override names it.

        Raises:
            InvalidBackendError: the op cannot have the policy, which could not be told before it was there.
        """
        with _lock:
            op = find_op(name) if replace or name not in self.ops else None
            if op is None or self._uppermost.get(name) == (op, policy):
                return
            problem = None if policy is None else entry_problem(name, policy)
            if problem is not None:
                raise InvalidBackendError(f"policies of the backend for {self.backend.device_type!r}: {problem}")
            had_one = has_kernel_for_dispatch_key(name, self.key)
            self._register(name, op, policy)
            self._displace_python_kernel(op)
            self._uppermost[name] = op, policy
            if not had_one:
                self.added |= {name}
            self.ops |= {name}

    def add_pending(self) -> None:
        """Put in place kernels for the ops that have appeared since; costs less than a microsecond for each pending."""
        for name in self.pending:
            if has_kernel(name):
                self.add(name, self._policies[name])
        self.pending -= self.ops

    def _displace_python_kernel(self, op: OpOverload) -> None:
        """Set aside what torch.library.register_autocast gave the op for tracing, where it would be called first."""
        kernel = python_kernels(op).pop(dispatch_key(self.key), None)
        if kernel is not None:
            self._displaced.append((op, kernel))
            clear_dispatch_cache(op)

    def remove(self) -> None:
        """Give the dispatcher back the kernels that were there before."""
        self._unregister()
        cached_cast.look_up_anew()
        for op, kernel in self._displaced:
            python_kernels(op)[dispatch_key(self.key)] = kernel
            clear_dispatch_cache(op)
        self.ops = self.added = self.pending = frozenset()

    @abstractmethod
    def _register(self, name: str, op: OpOverload, policy: CastPolicy | None) -> None: ...

    @abstractmethod
    def _serve_cached_casts(self) -> None: ...

    @abstractmethod
    def _let_other_ops_pass(self) -> None: ...

    @abstractmethod
    def _unregister(self) -> None: ...
