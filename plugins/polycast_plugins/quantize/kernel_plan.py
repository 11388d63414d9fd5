"""`KernelPlan`: computes a recipe with the backend's kernels, from prepacked weights.

Prepacked weights are cached in the region's WeightCache or, without one, in a cache of the process: prepacking in each
region would cost more than a recipe saves.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from polycast.plugin import (
    Backend,
    Extension,
    LowBitKernel,
    Plan,
    Recipe,
    check,
    events,
    hold_during_fork,
    recipe_kernels,
)

from .weight_matrices import checked_prepack, describe

CANNOT_PREPACK = "the weight cannot be prepacked"
IN_FUNCTION = (
    "an autograd.Function computes it, so a backward may follow, and quantized kernels have none: use "
    "torch.inference_mode() for inference"
)

_lock = threading.RLock()  # reentrant: the garbage collector may run ops
hold_during_fork(lambda: [_lock])
_ids: list[tuple[weakref.ref[Extension], dict[Hashable, int]]] = []
"""The ids of prepacked weights by backend or extension, since two instances of one class may prepack differently."""
_formats: dict[int, "PrepackedFormat"] = {}
"""By their id, the format of prepacked weights."""


@dataclass(frozen=True)
class PrepackedFormat:
    """Identifies the kernel and the recipe of a prepacked weight, in text that is the same in all processes.

    Attributes:
        device: the device type.
        backend: the class of the backend, or of the extension, that has the kernel, and the version of the
            distribution that supplies it.
        recipe: the text of the recipe.
        op: an op that uses it, by its name in the dispatcher.
        kernel: the class of the kernel, what it says of its layout, and its constants, such as the instruction set.
    """

    device: str
    backend: str
    recipe: str
    op: str
    kernel: str


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel that may compute an op in a plan.

    Attributes:
        kernel: the kernel.
        package: the distribution that supplies it; empty for a backend that is registered by hand.
        prepack_id: the id of the weights that it prepacks; interchangeable weights have the same id.
        format: how it prepacks weights, in text that is the same in all processes.
        prepack: prepacks a weight; returns None if it cannot.
        action: calls its operator; None if it has none, or if Python must check for a capture.
    """

    kernel: LowBitKernel
    package: str
    prepack_id: int
    format: PrepackedFormat
    prepack: Callable[[torch.Tensor], tuple[torch.Tensor, ...] | None]
    action: Plan.Action | None


class KernelPlan(Plan):
    """Computes ops by one recipe with the kernels of a backend, and of the extensions of its device.

    Attributes:
        planned: the kernels by op, in the order in which they are asked.
    """

    def __init__(self, backend: Backend, recipe: Recipe) -> None:
        super().__init__(backend, recipe)
        self._min_size = recipe.min_size
        self.unavailable_reason = self.NO_KERNEL
        self.planned: Mapping[str, Sequence[PlannedKernel]] = {}
        answer = check(backend, recipe)
        if answer.available:
            kernels = recipe_kernels(backend, recipe)
            self.planned = {op: [self._plan(op, *each) for each in found] for op, found in kernels.items()}
        else:
            self.unavailable_reason = answer.reason
        self.kernels = {op: planned[0].kernel for op, planned in self.planned.items()}

    def _plan(self, op: str, kernel: LowBitKernel, given: Extension, package: str, version: str) -> PlannedKernel:
        prepack_id = _prepack_id(given, self.recipe, op, kernel)
        made = _format_of(given, f"{package} {version}".strip(), self.recipe, op, kernel)
        _formats.setdefault(prepack_id, made)
        prepack = checked_prepack(kernel, self.recipe, op)
        action = self.operator_action(kernel, prepack_id)
        return PlannedKernel(kernel, package, prepack_id, made, prepack, action)

    def choose(
        self, op: str, args: Sequence[Any], checked: bool = False, with_vetoes: bool = True
    ) -> PlannedKernel | str:
        """Return the kernel that computes a call, or why the recipe declines the call.

        A recipe may also decline a call because its weight cannot be prepacked.

        Args:
            op: by its name in the dispatcher.
            args: its arguments, in the order of the schema.
            checked: whether the caller has checked the tensors.
            with_vetoes: whether to ask the vetoes of plugins, such as that the kernel is slower.
        """
        planned = self.planned.get(op)
        if planned is None:
            return self.unavailable_reason
        if not checked and (reason := self.unsupported_tensor(args, torch.is_grad_enabled())) is not None:
            return reason
        weight = args[planned[0].kernel.weight]
        if not isinstance(weight, torch.Tensor):
            return "its weight is no tensor"
        if weight.numel() < self._min_size:
            return self.SMALL
        found = self.first(op, args)
        if isinstance(found, str) or not with_vetoes:
            return found
        return self.veto(op, args) or found

    def first(self, op: str, args: Sequence[Any]) -> PlannedKernel | str:
        """Return the first kernel that supports a call, or why none does. The op must have a kernel."""
        reasons: dict[str, None] = {}
        for each in self.planned[op]:
            reason = each.kernel.unsupported_reason(*args)
            if reason is None:
                return each
            reasons[reason] = None
        return "; ".join(reasons)

    @override
    def why_no_kernel(self, op: str) -> str | None:
        return None if op in self.kernels else self.unavailable_reason

    @override
    def explain(
        self, op: str, args: Sequence[Any], cache: Plan.Cache | None, dtype: torch.dtype
    ) -> Plan.Computed | str:
        found = self.choose(op, args)
        if isinstance(found, str):
            return found
        weight = args[found.kernel.weight]
        if not weight.is_meta and self.weight_of(weight) is None:
            return self.NO_WEIGHT
        return Plan.Computed(reason=describe(self.recipe, found.kernel, op, weight), package=found.package)

    @override
    def perform(
        self, op: str, args: Sequence[Any], cache: Plan.Cache | None, checked: bool
    ) -> tuple[torch.Tensor | None, Plan.Action | None]:
        result: torch.Tensor | str
        action: Plan.Action | None = None
        if self.in_function():
            result, action = IN_FUNCTION, self.DECLINED
        elif not checked and self.is_intercepted():
            result = self.INTERCEPTED
        elif events.calibration.here():
            result = self._calibrate(op, args)
        else:
            result, action = self._compute(op, args, cache, checked)
            if result is self.INTERCEPTED:
                result = self.in_graph(op, args, cache)
                if isinstance(result, torch.Tensor):
                    return result, None  # the operator notifies when it runs
        if events.recipe_call or events.calibration:
            action = None  # they are notified of each call
        self._notify(op, args, result)
        return None if isinstance(result, str) else result, action

    @override
    def compute(self, op: str, args: Sequence[Any], cache: Plan.Cache | None) -> torch.Tensor | str:
        result, _ = self._compute(op, args, cache)
        self._notify(op, args, result)
        return result

    def _notify(self, op: str, args: Sequence[Any], result: torch.Tensor | str) -> None:
        if not events.recipe_call:
            return
        if isinstance(result, str):
            self.notify(op, result)
        else:
            planned = self.planned[op]
            found = planned[0] if len(planned) == 1 else self.first(op, args)
            self.notify(op, None, package="" if isinstance(found, str) else found.package)

    def _calibrate(self, op: str, args: Sequence[Any]) -> torch.Tensor | str:
        """Notify this thread's listeners of a call, and compute it in float32; or return why the recipe declines it."""
        found = self.choose(op, args, with_vetoes=False)  # batches may have other sizes than the program's
        if isinstance(found, str):
            return found
        events.calibration.notify(found.kernel, op, args)
        result: torch.Tensor = self.in_dtype(op, args, torch.float32).to(torch.get_autocast_dtype(self.device_type))
        return result

    def _compute(
        self, op: str, args: Sequence[Any], cache: Plan.Cache | None, checked: bool = False
    ) -> tuple[torch.Tensor | str, Plan.Action | None]:
        """Return the result of an op, or why the recipe declines it; and the action that does the same, or None."""
        found = self.choose(op, args, checked)
        if isinstance(found, str):
            return found, self.DECLINED
        kernel = found.kernel
        weight: torch.Tensor = args[kernel.weight]
        if self.may_capture and self.backend.is_capturing():
            return self.NOT_CACHED, None
        # Traced tensors are of subclasses too, but caching is not safe then.
        if (
            not checked
            and any(isinstance(arg, torch.Tensor) and self.is_special(arg) for arg in args)
            and not self.is_traced()
        ):
            return self.SUBCLASS, None
        prepared = self.prepacked(weight, cache, found.prepack_id, found.prepack)
        if prepared is None:
            return CANNOT_PREPACK, None
        if isinstance(prepared, str):
            return prepared, None
        result = kernel.run(prepared, *args)
        dtype = torch.get_autocast_dtype(self.device_type)
        return result if result.dtype is dtype else result.to(dtype), found.action


def format_of_id(prepack_id: int) -> PrepackedFormat | None:
    """Return the format of the prepacked weights that have an id; None for those of other plans."""
    return _formats.get(prepack_id)


def _prepack_id(given: Extension, recipe: Recipe, op: str, kernel: LowBitKernel) -> int:
    # Not by kernel: equal recipes share prepacked weights, and may have kernels of their own.
    key = recipe.format, kernel.prepack_key, op if kernel.prepack_key is None else None
    with _lock:
        _ids[:] = [known for known in _ids if known[0]() is not None]
        ids = next((ids for of, ids in _ids if of() is given), None)
        if ids is None:
            ids = {}
            _ids.append((weakref.ref(given), ids))
        return ids.get(key) or ids.setdefault(key, Plan.new_id())


def _format_of(given: Extension, package: str, recipe: Recipe, op: str, kernel: LowBitKernel) -> PrepackedFormat:
    """Return the format of a kernel's prepacked weights, given the name and version of the kernel's package."""
    constants = ", ".join(_constants(kernel))
    layout = "" if kernel.prepack_key is None else f" ({_text(kernel.prepack_key)})"
    return PrepackedFormat(
        given.device_type,
        f"{_text(type(given))}{f' {package}' if package else ''}",
        recipe.text,
        op,
        f"{_text(type(kernel))}{layout}{f', {constants}' if constants else ''}",
    )


def _constants(kernel: LowBitKernel) -> list[str]:
    """Return the constants of a kernel, with the names that they have in its operator."""
    values = [_text(value) for value in kernel.constants]
    if kernel.operator is None or not values:
        return values
    arguments = kernel.operator._schema.arguments[-len(values) :]
    return [f"{argument.name}={value}" for argument, value in zip(arguments, values, strict=True)]


def _text(value: Any) -> str:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    known = isinstance(value, (bool, int, float, str, torch.dtype, type(None)))
    return repr(value) if known else _text(type(value))  # the text of others may have an address
