"""The reference engine: autocast's semantics in Python kernels at a device's Autocast dispatch key.

One kernel for each op of the backend's table, registered with torch.library. A kernel excludes its own key, casts what
the op's policy says, and calls the op again, so that autograd and everything below see the inputs that were cast.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.library import Library, fallthrough_kernel
from typing_extensions import override

from ..backend import Backend
from ..casting import is_eligible, op_caster, promotion
from ..interop.interpreted import interpreted
from ..policy import CastPolicy, optional_dtype, overload_with_dtype
from ..state import PythonStateMachine
from ..weights import PythonStore
from .kernels import Kernels, dispatch_key, refusal

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]


class ReferenceEngine(PythonStateMachine):
    """The engine that needs no compiler."""

    name = "reference"

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Put a backend's kernels in place."""
        return _PythonKernels(backend, policies, self)

    def policy(self, name: str, device_type: str, default: CastPolicy | None) -> CastPolicy | None:
        """Return the policy of an op in this thread's region."""
        region = self.innermost(device_type)
        overlay = None if region is None else region[0]
        return default if overlay is None else overlay.get(name, default)

    def store(self, device_type: str) -> PythonStore | None:
        """Return where this thread's region keeps casts; None where it is in none."""
        region = self.innermost(device_type)
        if region is None:
            return None
        return self.own_store() if region[1] is None else region[1].store("reference", PythonStore)


class _PythonKernels(Kernels):
    def __init__(self, backend: Backend, policies: Mapping[str, CastPolicy], engine: ReferenceEngine) -> None:
        self._engine = engine
        self._libraries: dict[str, Library] = {}
        super().__init__(backend, policies)

    def _library(self, namespace: str) -> Library:
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        return self._libraries[namespace]

    @override
    def _register(self, name: str, op: torch._ops.OpOverload, policy: CastPolicy | None) -> None:
        namespace, _, name_in_it = name.partition("::")
        kernel = _Kernel(op, name, policy, self.backend, self.key, self._engine)
        with warnings.catch_warnings():
            # torch warns, once in a process, that a kernel is overridden: that is what is meant here.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self._library(namespace).impl(  # type: ignore[no-untyped-call]
                name_in_it, kernel, self.key, with_keyset=True, allow_override=True
            )

    @override
    def _let_other_ops_through(self) -> None:
        self._library("_").fallback(fallthrough_kernel, self.key)  # type: ignore[no-untyped-call]

    @override
    def _unregister(self) -> None:
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]
        self._libraries = {}


class _Kernel:
    """What runs for one op at one device's Autocast key."""

    def __init__(
        self,
        op: torch._ops.OpOverload,
        name: str,
        policy: CastPolicy | None,
        backend: Backend,
        key: str,
        engine: ReferenceEngine,
    ) -> None:
        self.op = op
        self.name = name
        self.policy = policy
        self.backend = backend
        self.engine = engine
        self.device_type = backend.device_type
        self.key_set = torch._C.DispatchKeySet(dispatch_key(key))
        self.below = torch._C._dispatch_keyset_full_after(dispatch_key(key))

    @interpreted
    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        policy = self.engine.policy(self.name, self.device_type, self.policy)
        if policy is None:  # as if there were no kernel here: what the op is made of is autocast as ever
            return self.op.redispatch(keys & self.below, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(self.key_set):
            return _RULES[policy](self, args, kwargs)

    def cast_to(self, dtype: torch.dtype, args: _Args, kwargs: _Kwargs) -> Any:
        store = self.engine.store(self.device_type)
        if dtype is torch.float32 or self.backend.is_capturing():
            store = None
        cast = op_caster(self.device_type, dtype, store)
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
    raise RuntimeError(refusal(kernel.backend, kernel.name))


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
