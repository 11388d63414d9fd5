"""The reference engine: autocast's semantics in Python kernels at a device's Autocast dispatch key.

One kernel for each op of the backend's table, registered with torch.library. A kernel excludes its own key, casts what
the op's policy says, and calls the op again, so that autograd and everything below see the inputs that were cast.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.library import Library, fallthrough_kernel

from .. import state
from ..backend import Backend
from ..casting import is_eligible, op_caster, promotion
from ..policy import CastPolicy, find_op, optional_dtype, overload_with_dtype

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]


class Kernels:
    """The kernels of one backend, in place from construction until :meth:`remove`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.key = "Autocast" + torch._C._dispatch_key_for_device(backend.device_type)
        self.ops: frozenset[str] = frozenset()
        """The ops that have a kernel here, by their names in the dispatcher."""
        self.added: frozenset[str] = frozenset()
        """Those of them that torch itself has none for."""
        self._libraries: dict[str, Library] = {}
        self._lock = threading.Lock()
        try:
            self._let_other_ops_through()
            for name, policy in backend.policies.items():
                self.add(name, policy)
        except BaseException:
            self.remove()
            raise

    def _let_other_ops_through(self) -> None:
        """Have ops that are not in the table pass by the key: torch does so only for the devices it has tables for."""
        if not torch._C._dispatch_has_backend_fallback(_dispatch_key(self.key)):
            library = self._libraries["_"] = Library("_", "IMPL")  # type: ignore[no-untyped-call]
            library.fallback(fallthrough_kernel, self.key)  # type: ignore[no-untyped-call]

    def add(self, name: str, policy: CastPolicy) -> None:
        """Put a kernel for one op in place, unless there is one or the running torch lacks the op."""
        with self._lock:
            op = find_op(name) if name not in self.ops else None
            if op is None:
                return
            had_one = torch._C._dispatch_has_kernel_for_dispatch_key(name, self.key)
            kernel = _Kernel(op, name, policy, self.backend, self.key)
            namespace = name.partition("::")[0]
            library = self._libraries.get(namespace)
            if library is None:
                library = self._libraries[namespace] = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():
                # torch warns, once in a process, that a kernel is overridden: that is what is meant here.
                warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
                library.impl(name.partition("::")[2], kernel, self.key)  # type: ignore[no-untyped-call]
            self.ops |= {name}
            if not had_one:
                self.added |= {name}

    def remove(self) -> None:
        """Give the dispatcher back the kernels that were there before."""
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]
        self._libraries = {}
        self.ops = self.added = frozenset()


def _dispatch_key(name: str) -> torch._C.DispatchKey:
    key = torch._C._parse_dispatch_key(name)  # the enumeration lacks some of the keys that there are
    assert key is not None
    return key


class _Kernel:
    """What runs for one op at one device's Autocast key."""

    def __init__(self, op: torch._ops.OpOverload, name: str, policy: CastPolicy, backend: Backend, key: str) -> None:
        self.op = op
        self.name = name
        self.policy = policy
        self.backend = backend
        self.device_type = backend.device_type
        self.key_set = torch._C.DispatchKeySet(_dispatch_key(key))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = state.innermost(self.device_type)
        policy = self.policy
        if frame is not None and frame.overlay:
            policy = frame.overlay.get(self.name, policy)
        with torch._C._ExcludeDispatchKeyGuard(self.key_set):
            return _RULES[policy](self, args, kwargs)

    def cast_to(self, dtype: torch.dtype, args: _Args, kwargs: _Kwargs) -> Any:
        cast = op_caster(self.device_type, dtype, self.backend.is_capturing)
        return self.op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    def first_is_eligible(self, args: _Args, kwargs: _Kwargs) -> bool:
        first = args[0] if args else kwargs.get(self.op._schema.arguments[0].name)
        return is_eligible(first, self.device_type)


def _lower_precision_fp(kernel: _Kernel, args: _Args, kwargs: _Kwargs) -> Any:
    return kernel.cast_to(torch.get_autocast_dtype(kernel.device_type), args, kwargs)


def _fp32(kernel: _Kernel, args: _Args, kwargs: _Kwargs) -> Any:
    return kernel.cast_to(torch.float32, args, kwargs)


def _fp32_set_opt_dtype(kernel: _Kernel, args: _Args, kwargs: _Kwargs) -> Any:
    if kernel.first_is_eligible(args, kwargs):
        position = optional_dtype(kernel.op)
        assert position is not None  # the table was validated
        name = kernel.op._schema.arguments[position].name
        if position < len(args):
            if args[position] is None:
                args = (*args[:position], torch.float32, *args[position + 1 :])
        elif kwargs.get(name) is None:
            kwargs = {**kwargs, name: torch.float32}
    return kernel.op(*args, **kwargs)


def _fp32_append_dtype(kernel: _Kernel, args: _Args, kwargs: _Kwargs) -> Any:
    overload = overload_with_dtype(kernel.op)
    assert overload is not None  # the table was validated
    # Defaults that the caller left out are this overload's, which the one with a dtype need not have.
    arguments = kernel.op._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        if argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    dtype = torch.float32 if kernel.first_is_eligible(args, kwargs) else given[arguments[0].name].dtype
    return overload(**given, dtype=dtype)


def _promote(kernel: _Kernel, args: _Args, kwargs: _Kwargs) -> Any:
    dtype = promotion((*args, *kwargs.values()), kernel.device_type)
    return kernel.op(*args, **kwargs) if dtype is None else kernel.cast_to(dtype, args, kwargs)


def _banned(kernel: _Kernel, args: _Args, kwargs: _Kwargs) -> Any:
    remedy = kernel.backend.remedies.get(kernel.name, "Call it in a region with enabled=False, on float32 inputs.")
    raise RuntimeError(f"{kernel.name} is unsafe to autocast on {kernel.device_type}. {remedy}")


def _passthrough(kernel: _Kernel, args: _Args, kwargs: _Kwargs) -> Any:
    return kernel.op(*args, **kwargs)


_RULES: dict[CastPolicy, Callable[[_Kernel, _Args, _Kwargs], Any]] = {
    CastPolicy.LOWER_PRECISION_FP: _lower_precision_fp,
    CastPolicy.FP32: _fp32,
    CastPolicy.FP32_SET_OPT_DTYPE: _fp32_set_opt_dtype,
    CastPolicy.FP32_APPEND_DTYPE: _fp32_append_dtype,
    CastPolicy.PROMOTE: _promote,
    CastPolicy.BANNED: _banned,
    CastPolicy.PASSTHROUGH: _passthrough,
}
