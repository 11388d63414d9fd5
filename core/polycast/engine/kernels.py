"""The kernels of one backend at its device's Autocast dispatch key: which there are, and putting them in place."""

import threading
from abc import ABC, abstractmethod

import torch

from ..backend import Backend
from ..policy import CastPolicy, find_op


def autocast_key(device_type: str) -> str:
    """Return the name of a device's Autocast dispatch key."""
    return "Autocast" + torch._C._dispatch_key_for_device(device_type)


def dispatch_key(name: str) -> torch._C.DispatchKey:
    """Return a dispatch key by its name; the enumeration lacks some of those that there are."""
    key = torch._C._parse_dispatch_key(name)
    assert key is not None
    return key


def refusal(backend: Backend, name: str) -> str:
    """Return what a banned op says when it is called."""
    remedy = backend.remedies.get(name, "Call it in a region with enabled=False, on float32 inputs.")
    return f"{name} is unsafe to autocast on {backend.device_type}. {remedy}"


class Kernels(ABC):
    """The kernels of one backend, in place from construction until :meth:`remove`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.key = autocast_key(backend.device_type)
        self.ops: frozenset[str] = frozenset()
        """The ops that have a kernel here, by their names in the dispatcher."""
        self.added: frozenset[str] = frozenset()
        """Those of them that torch itself has none for."""
        self._lock = threading.Lock()
        try:
            # Ops that are not in the table pass by the key. torch sees to it for the devices that it has tables for.
            if not torch._C._dispatch_has_backend_fallback(dispatch_key(self.key)):
                self._let_other_ops_through()
            for name, policy in backend.policies.items():
                self.add(name, policy)
        except BaseException:
            self.remove()
            raise

    def add(self, name: str, policy: CastPolicy | None) -> None:
        """Put a kernel for one op in place, unless there is one or the running torch lacks the op.

        With a policy of None the op runs as if it had no kernel, save in regions whose overlay names it.
        """
        with self._lock:
            op = find_op(name) if name not in self.ops else None
            if op is None:
                return
            had_one = torch._C._dispatch_has_kernel_for_dispatch_key(name, self.key)
            self._register(name, op, policy)
            self.ops |= {name}
            if not had_one:
                self.added |= {name}

    def remove(self) -> None:
        """Give the dispatcher back the kernels that were there before."""
        self._unregister()
        self.ops = self.added = frozenset()

    @abstractmethod
    def _register(self, name: str, op: torch._ops.OpOverload, policy: CastPolicy | None) -> None: ...

    @abstractmethod
    def _let_other_ops_through(self) -> None: ...

    @abstractmethod
    def _unregister(self) -> None: ...
