"""A gradient scaler that scales only if the fast dtype needs it."""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from polycast import get_autocast_dtype
from polycast.errors import AutocastDisabledWarning, warn_user
from polycast.plugin import check, events, get_backend

from .records import Origin
from .scaler_ops import with_scaler_ops
from .steps import MAX_NAMES, ScalerHistory, SkippedStep

_MAX_PENDING = 100
MAX_SKIPPED = 1000
"""The number of skipped steps that a history keeps: the latest."""
_HISTORY = "history"
"""The key of the history in a state."""


class ScalerListener(Protocol):
    """A listener for scalers."""

    def origin(self, scaler: "RecordingGradScaler") -> Origin | None:
        """Return the first op of the step that produced inf or nan; called when a step is skipped."""

    def updated(self, scaler: "RecordingGradScaler", scale: float | None, skip: SkippedStep | None) -> None:
        """Note the end of a step, with its scale if it is known yet."""


listeners: events.Event[ScalerListener] = events.Event()


class HistoryRecorder:
    """Records a history, step by step."""

    def __init__(self, history: ScalerHistory | None = None) -> None:
        history = history or ScalerHistory()
        self.steps, self._skips = history.steps, history.skips
        self._scales = list(history.scales)
        self._skipped = deque(history.skipped, MAX_SKIPPED)

    def add(self, scale: float | None, skip: SkippedStep | None) -> None:
        """Record a step: its scale, if it is known, and whether it was skipped."""
        if scale is not None and (not self._scales or self._scales[-1][1] != scale):
            self._scales.append((self.steps, scale))
        if skip is not None:
            self._skips += 1
            self._skipped.append(replace(skip, step=self.steps))
        self.steps += 1

    def history(self) -> ScalerHistory:
        """Return the history so far."""
        return ScalerHistory(self.steps, tuple(self._scales), self._skips, tuple(self._skipped))


@dataclass
class _Step:
    """A step between two calls of ``update``."""

    scale: float | None = None
    skip: SkippedStep | None = None
    found_inf: list[torch.Tensor] = field(default_factory=list)
    device_scale: torch.Tensor | None = None


class RecordingGradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler with a :attr:`history`.

    A step that is not skipped costs one read of the scale, where the scaler has waited for the device already; a
    skipped one reads all gradients once. An optimizer with ``fused=True`` on a GPU decides on the device, so its steps
    are read later, 100 at once, and skipped ones have no parameters; for these record the steps in a
    ``polycast.RunLog``, which waits for the device, call ``unscale_``, or use ``fused=False``. ``state_dict`` contains
    the history under a key of its own, ``"history"``, which torch's scaler ignores.
    """

    def __init__(self, device: str = "cuda", *, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__(device, **options)
        self._start_history(model)

    def _start_history(self, model: nn.Module | None) -> None:
        self._recorder = HistoryRecorder()
        self._now = _Step()
        self._pending: list[_Step] = []
        self.name_parameters(model)

    def name_parameters(self, model: nn.Module | None) -> None:
        """Name parameters in the history as ``model.named_parameters()`` does; the model is held weakly."""
        self._model = None if model is None else weakref.ref(model)

    @property
    def has_names(self) -> bool:
        """Whether a model that is alive names the parameters."""
        return self._model is not None and self._model() is not None

    @property
    def history(self) -> ScalerHistory:
        """The scale and the skipped steps so far. On a GPU with a fused optimizer, waits for the device."""
        self._read_pending()
        return self._recorder.history()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step as :meth:`torch.amp.GradScaler.step` does, and record whether the step was skipped."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if not _calls_hooks(optimizer):
            value = super().step(optimizer, *args, **kwargs)
            self._now.scale = self.get_scale()
            if any(found.item() for found in self._found_inf_per_device(optimizer).values()):
                self._skip(optimizer)
            return value
        found_inf: list[torch.Tensor | None] = []

        def steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            found_inf.append(getattr(optimizer, "found_inf", None))
            if found_inf[0] is None or not _is_read_later(found_inf[0]):
                self._now.scale = self.get_scale()  # the scaler has waited for the device
            elif self._now.device_scale is None:
                self._now.device_scale = self.scale(torch.ones((), device=found_inf[0].device))

        hook = optimizer.register_step_pre_hook(steps)
        try:
            value = super().step(optimizer, *args, **kwargs)
        finally:
            hook.remove()
        if not found_inf:
            self._skip(optimizer)
        elif (fused := found_inf[0]) is not None:
            if _is_read_later(fused):
                self._now.found_inf.append(fused)
            elif fused.item():
                self._skip(optimizer)
        return value

    def _skip(self, optimizer: torch.optim.Optimizer) -> None:
        self._now.scale = scale = self.get_scale()
        before = self._now.skip  # of another optimizer
        origins = [each.origin(self) for each in listeners] if before is None else []  # these may name the parameters
        found, count = _nonfinite_gradients(optimizer, None if self._model is None else self._model())
        if before is None:
            origin = next(filter(None, origins), None)
            before = SkippedStep(self._recorder.steps + len(self._pending), scale, (), 0, 0, origin)
        self._now.skip = SkippedStep(
            step=before.step,
            scale=scale,
            parameters=(*before.parameters, *found)[:MAX_NAMES],
            count=(before.count or 0) + len(found),
            of=(before.of or 0) + count,
            origin=before.origin,
        )

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        with with_scaler_ops(self._device):
            return super()._unscale_grads_(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as :meth:`torch.amp.GradScaler.update` does, and record the step."""
        if not self._enabled:
            return
        with with_scaler_ops(self._device):
            super().update(new_scale)
        step, self._now = self._now, _Step()
        for listener in listeners:
            listener.updated(self, step.scale, step.skip)
        if step.found_inf:
            self._pending.append(step)
            if len(self._pending) >= _MAX_PENDING:
                self._read_pending()
        else:
            self._read_pending()
            self._recorder.add(step.scale, step.skip)

    def _read_pending(self) -> None:
        steps, self._pending = self._pending, []
        if not steps:
            return
        scales = torch.stack([each.device_scale for each in steps if each.device_scale is not None]).tolist()
        skipped = torch.stack([torch.stack(each.found_inf).sum() for each in steps]).tolist()
        for step, scale, was_skipped in zip(steps, scales, skipped, strict=True):
            skip = step.skip or (SkippedStep(0, scale) if was_skipped else None)
            self._recorder.add(scale, skip)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler, with its history."""
        state = super().state_dict()
        return {**state, _HISTORY: self.history.to_dict()} if state else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, with its history if it has one.

        Raises:
            ValueError: the history is not one.
        """
        history = ScalerHistory.from_dict(state_dict[_HISTORY]) if _HISTORY in state_dict else None
        super().load_state_dict(dict(state_dict))
        if self._enabled:
            self._recorder, self._pending, self._now = HistoryRecorder(history), [], _Step()

    def __getstate__(self) -> dict[str, Any]:
        self._read_pending()
        return {**super().__getstate__(), "_model": None, "_now": _Step()}


def recording(scaler: torch.amp.GradScaler, model: nn.Module | None = None) -> RecordingGradScaler | None:
    """Make a scaler of another library record a history from now on; None: it is of a class of its own.

    Args:
        scaler: the scaler. It becomes a :class:`RecordingGradScaler` in place: the library may hold it in many places.
        model: the model that names the parameters.
    """
    if isinstance(scaler, RecordingGradScaler):
        if model is not None and not scaler.has_names:
            scaler.name_parameters(model)
        return scaler
    if type(scaler) is not torch.amp.GradScaler:
        return None
    scaler.__class__ = RecordingGradScaler
    assert isinstance(scaler, RecordingGradScaler)
    scaler._start_history(model)
    return scaler


def _calls_hooks(optimizer: object) -> bool:
    """Return whether an optimizer calls hooks: torch's do, but not all classes that wrap one."""
    hooked = getattr(getattr(type(optimizer), "step", None), "hooked", False)
    return bool(hooked) and hasattr(optimizer, "_optimizer_step_pre_hooks")


def _is_read_later(found_inf: torch.Tensor) -> bool:
    return _is_asynchronous(found_inf) and not listeners.here()


def _is_asynchronous(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _nonfinite_gradients(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> tuple[list[str], int]:
    """Return the names of the parameters with non-finite gradients, the last first, and how many have gradients."""
    parameters = list(_named(optimizer, model))
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, gradient in parameters:
        by_device.setdefault(gradient.device, []).append(torch.isfinite(gradient).all())
    finite = {device: iter(torch.stack(flags).tolist()) for device, flags in by_device.items()}
    found = [name for name, gradient in parameters if not next(finite[gradient.device])]
    return found[::-1], len(parameters)


def _named(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter's name and the values of its gradient, in the order of the model if there is one."""
    of_model = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    order = {address: number for number, address in enumerate(of_model)}
    found: list[tuple[int, str, torch.Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or ()
        if len(names) != len(group["params"]):  # or the program has edited the group
            names = [
                f"group {number}, parameter {position} {tuple(parameter.shape)}"
                for position, parameter in enumerate(group["params"])
            ]
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.grad is not None:
                address = id(parameter)
                found.append((order.get(address, -1), of_model.get(address, name), _values(parameter.grad)))
    for _, name, gradient in sorted(found, key=lambda each: each[0]):
        yield name, gradient


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient that are on this process."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.coalesce().values() if local.is_sparse else local


_FLOAT32_SMALLEST = torch.finfo(torch.float32).smallest_normal


def grad_scaler(
    device_type: str,
    dtype: torch.dtype | None = None,
    *,
    enabled: bool = True,
    model: nn.Module | None = None,
    **options: Any,
) -> RecordingGradScaler:
    """Return a torch.amp.GradScaler that is enabled if the dtype of ``autocast(device_type, dtype)`` needs it.

    Small gradients underflow in a dtype with a smaller exponent range than float32, such as float16, unless the loss is
    scaled. For other dtypes (bfloat16, float32) the scaler does nothing, so one training loop serves every dtype.

    The scaler's ``history`` has the scale and the skipped steps, with the parameters whose gradients were not finite.

    Args:
        device_type: the device to train on.
        dtype: the fast dtype. None: that of ``autocast(device_type)``.
        enabled: False for a scaler that is off with every dtype.
        model: the model that names the parameters in the history, held weakly. None: they have the names of an
            optimizer made from ``model.named_parameters()``, or their position.
        options: other arguments of torch.amp.GradScaler, such as ``init_scale`` and ``growth_interval``.

    Raises:
        TypeError: `dtype` is not a torch.dtype, `enabled` not a bool, `model` not a module, or an option does not
            exist.
        ValueError: `dtype` is not floating point.
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.

    Warns:
        AutocastDisabledWarning: the region would run disabled, so the scaler is disabled, too.

    Example:
        >>> import torch, polycast
        >>> polycast.grad_scaler("cpu", torch.float16).is_enabled(), polycast.grad_scaler("cpu").is_enabled()
        (True, False)
    """
    backend = get_backend(device_type)
    if dtype is None:
        dtype = get_autocast_dtype(backend.device_type)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"the fast dtype must be floating point, got {dtype}")
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {enabled!r}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {model!r:.100}")
    needed = enabled and torch.finfo(dtype).smallest_normal > _FLOAT32_SMALLEST
    answer = check(backend) and check(backend, dtype)
    if needed and not answer:
        reason = answer.reason.rstrip(".")
        warn_user(f"A region of {dtype} on {backend.device_type} runs disabled: {reason}.", AutocastDisabledWarning)
        needed = False
    return RecordingGradScaler(backend.device_type, enabled=needed, model=model, **options)
