"""The kernels of one backend at its device's Autocast dispatch key."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ..common.atfork import fork_safe_lock
from ..errors import InvalidBackendError, warn_user
from ..policy.cast_policy import CastPolicy
from ..policy.schemas import COMPOSED_OPS, find_op, policy_problem
from ..registry.backend import Backend
from ..registry.registry import registry
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
from ..torch_internals.higher_order_ops import HigherOrderOps
from .casts import cached_cast

installed: dict[str, "Kernels"] = {}
"""By device type, the kernels that are installed."""
REMEDIES = {
    "aten::binary_cross_entropy": (
        "The logarithm of a sigmoid or softmax loses its accuracy in reduced precision. Leave the sigmoid out and call "
        "torch.nn.functional.binary_cross_entropy_with_logits (or torch.nn.BCEWithLogitsLoss in place of "
        "torch.nn.BCELoss), which is safe to autocast; or call it in a region with enabled=False, on float32 inputs."
    )
}
"""Replacements for the banned ops of STANDARD_POLICIES, each as a sentence, by op name."""

_lock = fork_safe_lock()


def autocast_key(device_type: str) -> str:
    """Return the name of a device's Autocast dispatch key."""
    return "Autocast" + dispatch_key_for_device(device_type)


def refusal(backend: Backend, name: str) -> str:
    """Return the error message of a banned op."""
    remedy = {**REMEDIES, **backend.remedies}.get(name, "Call it in a region with enabled=False, on float32 inputs.")
    return f"{name} is unsafe to autocast on {backend.device_type}. {remedy}"


class Kernels(ABC):
    """The kernels of one backend, installed from construction until :meth:`remove`.

    Attributes:
        ops: the ops that have a kernel here, by their names in the dispatcher.
        added: those of them that torch itself has no kernel for.
        pending: the ops to install once they exist, in namespaces that other libraries may add to.
    """

    def __init__(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> None:
        self.backend = backend
        self.key = autocast_key(backend.device_type)
        self._dispatch_key = dispatch_key(self.key)
        self.ops = set[str]()
        self.added = set[str]()
        self.pending: frozenset[str] = frozenset()
        self._policies = policies
        self._newest: dict[str, tuple[OpOverload, CastPolicy | None]] = {}
        self._displaced: list[tuple[OpOverload, Any]] = []
        self._higher_order_ops = HigherOrderOps(self.key, backend.device_type)
        try:
            # Ops outside of the table fall through the key. torch registers that for the devices that it has tables of.
            if not has_backend_fallback(self.key):
                self._register_fallthrough()
            self._register_cached_cast()
            cached_cast.clear_operator_cache()
            for name, policy in policies.items():
                self.add(name, policy)
            for name in COMPOSED_OPS:
                if not has_kernel_for_dispatch_key(name, self.key):
                    self.add(name, None)
        except BaseException:
            self.remove()
            raise
        self.pending = frozenset(name for name in policies if name not in self.ops and not name.startswith("aten::"))

    def add(self, name: str, policy: CastPolicy | None, *, replace: bool = False) -> None:
        """Install a kernel for an op.

        Do nothing if this torch lacks the op, or if it has a kernel of this object and not `replace`.

        With a policy of None, the op runs as if it had no kernel, except in regions with a policy or a recipe for it.
        A composed op then skips autograd where it has nothing to record: below autograd, where the ops that it calls
        would run, a view of a weight has no base, so that autocast could not find the weight's cast.

        Raises:
            InvalidBackendError: the op cannot have the policy, which could not be checked before the op existed.
        """
        with _lock:
            op = find_op(name) if replace or name not in self.ops else None
            if op is None or self._newest.get(name) == (op, policy):
                return
            problem = None if policy is None else policy_problem(op, policy)
            if problem is not None:
                self._refuse(name, f"{name!r} {problem}")
                return
            had_kernel = has_kernel_for_dispatch_key(name, self.key)
            self._register(name, op, policy)
            self._displace_python_kernel(op)
            self._newest[name] = op, policy
            if not had_kernel:
                self.added.add(name)
            self.ops.add(name)

    def _refuse(self, name: str, problem: str) -> None:
        """Raise, or warn of an extension and leave its policy for the op out."""
        device_type = self.backend.device_type
        added = registry.added_policies(self.backend).get(name)
        if added is None:
            raise InvalidBackendError(f"policies of the backend for {device_type!r}: {problem}")
        self.pending -= {name}
        warn_user(
            f"A policy is left out that {added.distribution} adds to {device_type!r}: {problem}. Repair or uninstall "
            f"{added.distribution}."
        )

    def add_pending(self) -> None:
        """Install the kernels of pending ops that exist by now."""
        for name in self.pending:
            if has_kernel(name):
                self.add(name, self._policies[name])
        self.pending -= self.ops

    def _displace_python_kernel(self, op: OpOverload) -> None:
        """Remove the kernel that torch.library.register_autocast set for tracing, which would be called first."""
        kernel = python_kernels(op).pop(self._dispatch_key, None)
        if kernel is not None:
            self._displaced.append((op, kernel))
            clear_dispatch_cache(op)

    def remove(self) -> None:
        """Uninstall the kernels, and restore those before them."""
        self._unregister()
        self._higher_order_ops.remove()
        cached_cast.clear_operator_cache()
        for op, kernel in self._displaced:
            python_kernels(op)[self._dispatch_key] = kernel
            clear_dispatch_cache(op)
        self.ops, self.added, self.pending = set(), set(), frozenset()

    @abstractmethod
    def _register(self, name: str, op: OpOverload, policy: CastPolicy | None) -> None: ...

    @abstractmethod
    def _register_cached_cast(self) -> None: ...

    @abstractmethod
    def _register_fallthrough(self) -> None: ...

    @abstractmethod
    def _unregister(self) -> None: ...
