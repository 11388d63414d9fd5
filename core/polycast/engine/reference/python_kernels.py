"""The kernels of the reference engine: one for each op of the backend's table, registered with torch.library.

A kernel excludes its own key, casts what the op's policy says, and calls the op again, so that autograd and everything
below it see the inputs that were cast.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel
from typing_extensions import override

from ...common.events import events
from ...policy.cast_policy import CastPolicy
from ...policy.matching import Targets
from ...policy.schemas import COMPOSED_OPS, flatten_arguments, hidden_writes, unflatten_arguments
from ...registry.backend import Backend
from ...torch_internals.dispatcher import (
    DispatchKeySet,
    OpOverload,
    keys_below,
    redispatch,
    with_tensors_for_numbers,
)
from ...torch_internals.private_names import disable_dynamo
from ..casts.traced import cast_of_traced
from ..casts.weights import caching_is_safe, is_weight, only_modes_see_casts
from ..kernels import Kernels, refusal
from .rules import RULES, OpCall, is_eligible
from .state_machine import PythonStateMachine


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
            # torch warns once in a process that a kernel is overridden, which is intended here.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self._library(namespace).impl(  # type: ignore[no-untyped-call]
                name_in_it, kernel, self.key, with_keyset=True, allow_override=True
            )

    @override
    def _register_cached_cast(self) -> None:
        """Do nothing: the operator's own kernel casts at each call."""

    @override
    def _register_fallthrough(self) -> None:
        self._library("_").fallback(fallthrough_kernel, self.key)  # type: ignore[no-untyped-call]

    @override
    def _unregister(self) -> None:
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]
        self._libraries = {}


class _Kernel:
    """The kernel of one op at one device's Autocast key."""

    def __init__(
        self,
        op: OpOverload,
        name: str,
        policy: CastPolicy | None,
        backend: Backend,
        key: str,
        machine: PythonStateMachine,
    ) -> None:
        self._op = op
        self._name = name
        self._policy = policy
        self._backend = backend
        self._machine = machine
        self._device_type = backend.device_type
        self._is_eligible = functools.partial(is_eligible, device_type=backend.device_type)
        self._below = keys_below(key)

    @disable_dynamo
    def __call__(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        policy = self._machine.policy(self._name, self._device_type, self._policy)
        may_have_recipe = policy in (None, CastPolicy.LOWER_PRECISION_FP, CastPolicy.MATCH)
        if may_have_recipe and self._machine.has_recipe(self._name, self._device_type):
            from ..recipes import plan  # most regions have no recipe
            from ..recipes.in_dtype import should_make_contiguous

            with self._machine.without_autocast(self._device_type):
                if caching_is_safe() and should_make_contiguous(self._name, flatten_arguments(self._op, args, kwargs)):
                    args = (args[0].contiguous(), *args[1:])
                result, _ = plan.perform(self._name, self._device_type, flatten_arguments(self._op, args, kwargs))
                if result is not None:
                    return result
            # Python may have left the region. If autocast is off now, there is nothing to cast.
            is_on = torch.is_autocast_enabled(self._device_type)
            policy = (
                self._machine.policy(self._name, self._device_type, self._policy) if is_on else CastPolicy.PASSTHROUGH
            )
        if policy is None and self._name in COMPOSED_OPS and args[0].is_nested:
            # For nested tensors it calls ops without the dispatcher, so autocast would miss their inputs.
            policy = CastPolicy.LOWER_PRECISION_FP
        if policy is CastPolicy.MATCH:
            return self._match(keys, args, kwargs)
        # As if there were no kernel here: the ops that this one is made of are autocast.
        if policy is None and self._below is not None:
            return redispatch(self._op, keys & self._below, args, kwargs)
        with self._machine.without_autocast(self._device_type):
            if policy is CastPolicy.BANNED:
                raise RuntimeError(refusal(self._backend, self._name))
            fast = torch.get_autocast_dtype(self._device_type)
            missing = self._backend.missing_dtypes(self._name, (*args, *kwargs.values()))
            call = OpCall(self._op, args, kwargs, missing=missing)
            return self._run(RULES[policy or CastPolicy.PASSTHROUGH](call, fast, self._is_eligible))

    def _match(self, keys: DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op, whose operands are cast where torch would refuse them; the ops that it calls are autocast."""
        args = tuple(with_tensors_for_numbers(self._op, args))
        call = OpCall(self._op, args, kwargs, missing=self._backend.missing_dtypes(self._name))
        call = RULES[CastPolicy.MATCH](call, torch.get_autocast_dtype(self._device_type), self._is_eligible)
        written: dict[torch.Tensor, torch.Tensor] = {}
        if call.targets and self._machine.matches(self._device_type):
            events.matched_call.notify(self._device_type, self._name)
            given = flatten_arguments(self._op, args, kwargs)
            with self._machine.without_autocast(self._device_type):
                all_written = self._written(call._replace(dtype=torch.float32))
                written = {tensor: tensor.to(torch.float32) for tensor in all_written}
                cast = [
                    written[value] if isinstance(value, torch.Tensor) and value in written else _matched(value, target)
                    for value, target in zip(given, call.targets, strict=True)
                ]
            positional, kwargs = unflatten_arguments(self._op, cast)
            args = tuple(positional)
        if self._below is None:
            with self._machine.without_autocast(self._device_type):
                result = self._op(*args, **kwargs)
        else:
            result = redispatch(self._op, keys & self._below, args, kwargs)
        _write_back(written)
        return result

    def _run(self, call: OpCall) -> Any:
        op, args, kwargs, dtype, *_ = call._replace(args=tuple(with_tensors_for_numbers(call.op, call.args)))
        if dtype is None:
            return op(*args, **kwargs)
        written = {tensor: tensor.to(dtype) for tensor in self._written(call)}
        caches = self._backend.caches_casts and dtype is not torch.float32 and torch.is_autocast_cache_enabled()
        caches = caches and (caching_is_safe() or only_modes_see_casts()) and not self._backend.is_capturing()
        cast = _caster(self._device_type, dtype, self._machine if caches else None)
        positions = {argument.name: at for at, argument in enumerate(op._schema.arguments)}

        def cast_at(at: int, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value in written:
                return written[value]
            return cast(value) if call.casts(at) else value

        result = op(
            *(cast_at(at, value) for at, value in enumerate(args)),
            **{name: cast_at(positions[name], value) for name, value in kwargs.items()},
        )
        _write_back(written)
        return result

    def _written(self, call: OpCall) -> list[torch.Tensor]:
        """Return the tensors that a call writes though its op's schema does not say so, and that are to be cast."""
        positions, flag = hidden_writes(call.op)
        if not positions or call.only is not None:
            return []
        given = flatten_arguments(call.op, call.args, call.kwargs)
        if flag >= 0 and not given[flag]:
            return []
        return [
            given[position]
            for position in positions
            if self._is_eligible(given[position]) and given[position].dtype is not call.dtype
        ]


def _matched(value: Any, target: Targets) -> Any:
    """Return an argument with its tensors cast to what they are to be."""
    if isinstance(target, torch.dtype):
        return value.to(target)
    if isinstance(target, list):
        return [_matched(item, dtype) for item, dtype in zip(value, target, strict=True)]
    return value


def _write_back(casts: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Give tensors the values of their casts, as the op would have: it writes without a new version."""
    for tensor, cast in casts.items():
        if caching_is_safe():
            with torch.inference_mode():
                tensor.data.copy_(cast)
        else:
            with torch.no_grad():
                tensor.copy_(cast)


def _caster(device_type: str, dtype: torch.dtype, machine: PythonStateMachine | None) -> Callable[[Any], Any]:
    """Return a function that casts one argument of an op: a tensor, a list of tensors, or anything else, unchanged.

    If uses of a weight may share the history of its cast now, `machine` has the histories.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype is dtype or not is_eligible(value, device_type):
                return value
            if machine is not None:
                is_shared = value.requires_grad and torch.is_grad_enabled() and is_weight(value)
                return machine.cast_with_history(value, dtype, device_type) if is_shared else value.to(dtype)
            traced = None if dtype is torch.float32 else cast_of_traced(value, dtype, device_type)
            return value.to(dtype) if traced is None else traced
        if isinstance(value, (list, tuple)):
            return [cast(item) for item in value]
        return value

    return cast
