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

from ...plugins.backend import Backend
from ...policy.cast_policy import CastPolicy
from ...policy.schemas import flatten_arguments, optional_dtype, overload_with_dtype
from ...torch_internals.dispatcher import DispatchKeySet, OpOverload, excluding, keys_below, redispatch
from ..casting import is_eligible, promotion
from ..casts.traced import cast_of_traced
from ..casts.weight_cache import cache_by_identity
from ..casts.weights import Source, caching_is_safe, is_weight, weight_of
from ..disable_dynamo import disable_dynamo
from ..kernels import Kernels, refusal
from ..low_bit import compute as low_bit
from .state_machine import PythonStateMachine
from .store import PythonStore

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_CastWeight: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor | None]


class PythonKernels(Kernels):
    """The kernels of one backend, in Python."""

    def __init__(self, backend: Backend, policies: Mapping[str, CastPolicy], machine: PythonStateMachine) -> None:
        self._machine = machine
        self._libraries: dict[str, Library] = {}
        super().__init__(backend, policies)

    def _library(self, namespace: str) -> Library:
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        return self._libraries[namespace]

    @override
    def _register(self, name: str, op: OpOverload, policy: CastPolicy | None) -> None:
        namespace, _, name_in_it = name.partition("::")
        kernel = _Kernel(op, name, policy, self.backend, self.key, self._machine)
        with warnings.catch_warnings():
            # torch warns, once in a process, that a kernel is overridden: that is what is meant here.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self._library(namespace).impl(  # type: ignore[no-untyped-call]
                name_in_it, kernel, self.key, with_keyset=True, allow_override=True
            )

    @override
    def _serve_cached_casts(self) -> None:
        device = self.key.removeprefix("Autocast")
        kernel = _CachedCast(self.backend, self._machine)
        self._library("polycast").impl("cached_cast", kernel, device)  # type: ignore[no-untyped-call]

    @override
    def _let_other_ops_pass(self) -> None:
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
        op: OpOverload,
        name: str,
        policy: CastPolicy | None,
        backend: Backend,
        key: str,
        machine: PythonStateMachine,
    ) -> None:
        self.op = op
        self.name = name
        self.policy = policy
        self.backend = backend
        self.machine = machine
        self.device_type = backend.device_type
        self.without_autocast = excluding(key, self.device_type)
        self.below = keys_below(key)

    @disable_dynamo
    def __call__(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        policy = self.machine.policy(self.name, self.device_type, self.policy)
        # As if there were no kernel here: what the op is made of is autocast as ever.
        if policy is None and self.below is not None:
            return redispatch(self.op, keys & self.below, args, kwargs)
        with self.without_autocast():
            if policy is CastPolicy.LOWER_PRECISION_FP and self.machine.computes_low_bit(self.name, self.device_type):
                result = low_bit.perform(self.name, self.device_type, flatten_arguments(self.op, args, kwargs))
                if result is not None:
                    return result
            return _RULES[policy or CastPolicy.PASSTHROUGH](self, args, kwargs)

    def cast_to(self, dtype: torch.dtype, args: _Args, kwargs: _Kwargs) -> Any:
        keeps = dtype is not torch.float32 and torch.is_autocast_cache_enabled() and caching_is_safe()
        keeps = keeps and not self.backend.is_capturing()
        cast = _caster(self.device_type, dtype, self.machine.weight_caster(self.device_type) if keeps else None)
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
    given = dict(
        zip([argument.name for argument in arguments], flatten_arguments(kernel.op, args, kwargs), strict=True)
    )
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


class _CachedCast:
    """The device's kernel of polycast::cached_cast: a cast without history, on the memory of what is kept."""

    def __init__(self, backend: Backend, machine: PythonStateMachine) -> None:
        self._backend = backend
        self._machine = machine

    def __call__(self, weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
        device = self._backend.device_type
        keeps = is_weight(weight) and torch.is_autocast_cache_enabled() and caching_is_safe()
        with torch.no_grad():
            if not keeps or self._backend.is_capturing():
                return weight.to(dtype)
            region = None if cache else self._machine.innermost(device)
            named = cache_by_identity(cache) if region is None else region[1]
            if named is None:
                return weight.to(dtype)
            return named.store("reference", PythonStore).cast(Source(weight, weight), dtype)


def _caster(device_type: str, dtype: torch.dtype, cast_weight: _CastWeight | None) -> Callable[[Any], Any]:
    """Return a function that casts one argument of an op: a tensor, a list of tensors, or anything else, unchanged.

    Weights and views of them are cast by `cast_weight`, where a cast may be kept now.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype is dtype or not is_eligible(value, device_type):
                return value
            if cast_weight is not None:
                weight = weight_of(value)
                kept = None if weight is None else cast_weight(value, weight, dtype)
                return value.to(dtype) if kept is None else kept
            traced = None if dtype is torch.float32 else cast_of_traced(value, dtype, device_type)
            return value.to(dtype) if traced is None else traced
        if isinstance(value, (list, tuple)):
            return [cast(item) for item in value]
        return value

    return cast
