"""`StepLog`: what is recorded of a training step while it runs, and which op made it non-finite."""

import numbers
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from polycast.errors import warn_user
from polycast.plugin import dtype_name

from .conversions import share_of
from .grad_scaler import RecordingGradScaler
from .observer import observe_step
from .recorder import Reading, phase_of
from .records import Origin
from .steps import MAX_NAMES, SkippedStep, StepRecord

SameRandomNumbers: TypeAlias = Callable[[], AbstractContextManager[None]]


class RandomState:
    """The generators of the CPU, of the current device of a type, and of the devices of some tensors."""

    def __init__(self, device_type: str, tensors: Iterable[torch.Tensor] = ()) -> None:
        devices = dict.fromkeys([torch.device(device_type), *(tensor.device for tensor in tensors)])
        self._on_devices = [found for device in devices if (found := _generator_of(device)) is not None]

    def get(self) -> list[torch.Tensor]:
        """Return the current states."""
        return [torch.get_rng_state(), *(module.get_rng_state(*index) for module, index in self._on_devices)]

    def set(self, states: list[torch.Tensor]) -> None:
        """Set the states."""
        on_cpu, *on_devices = states
        torch.set_rng_state(on_cpu)
        for (module, index), state in zip(self._on_devices, on_devices, strict=True):
            module.set_rng_state(state, *index)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the current states after a block."""
        before = self.get()
        try:
            yield
        finally:
            self.set(before)


def _generator_of(device: torch.device) -> tuple[Any, tuple[torch.device, ...]] | None:
    """Return the module with the generator of a device, and the arguments that name it; None if there is none.

    Modules of types with one device, such as torch.mps, take no argument.
    """
    module = getattr(torch, device.type, None)
    if not hasattr(module, "get_rng_state"):
        return None
    has_several = getattr(module, "device_count", lambda: 1)() > 1
    return module, (device,) if has_several and device.index is not None else ()


def same_random_numbers(model: nn.Module | None) -> SameRandomNumbers:
    """Return a function that opens a block, which draws the same random numbers as the code after this call."""
    generators = RandomState("cpu", () if model is None else chain(model.parameters(), model.buffers()))
    states = generators.get()

    @contextmanager
    def block() -> Iterator[None]:
        with generators.preserved():
            generators.set(states)
            yield

    return block


def rerun_step(step: Callable[[], Any], model: nn.Module | None, random: SameRandomNumbers) -> Origin | None:
    """Rerun a step, and return the first op that produced inf or nan; None if none did."""
    observed = observe_step(model, nonfinite="record", stacks=True)
    with random(), _restored(model), observed:
        step()
    return None if observed.reading is None else observed.reading.first_nonfinite()


@contextmanager
def _restored(model: nn.Module | None) -> Iterator[None]:
    """Run a block without gradients; restore gradients and buffers after it."""
    parameters = [] if model is None else list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [] if model is None else [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class StepLog:
    """A step of a :class:`polycast.RunLog` while it runs."""

    def __init__(self, model: nn.Module | None, rerun: Callable[[], Any] | None) -> None:
        self._model, self._rerun = model, rerun
        self._random = None if rerun is None else same_random_numbers(model)
        self._loss: torch.Tensor | float | None = None
        self._scale: float | None = None
        self._skip: SkippedStep | None = None
        self._skipped: bool | None = None
        self.observed: observe_step | None = None

    def log(self, *, loss: torch.Tensor | float) -> None:
        """Record the loss: a number, or a tensor with one element. The last call in a step counts.

        Raises:
            TypeError, ValueError: it is neither.
        """
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss must have one element, got a tensor of shape {tuple(loss.shape)}: log its mean")
            if loss.is_complex():
                raise TypeError(f"loss must be real, got a tensor of {loss.dtype}: log its abs()")
            loss = loss.detach().clone()
        elif isinstance(loss, bool) or not isinstance(loss, numbers.Real):
            raise TypeError(f"loss must be a number or a tensor with one element, got {loss!r:.100}")
        self._loss = loss if isinstance(loss, torch.Tensor) else float(loss)

    @property
    def has_values(self) -> bool:
        """Whether anything was recorded."""
        return self._loss is not None or self._scale is not None

    def record(self, step: int, seconds: float) -> StepRecord:
        """Return the record of the step."""
        reading = self._reading
        return StepRecord(
            step=step,
            loss=None if self._loss is None else float(self._loss),
            scale=self._scale,
            skipped=self._skipped,
            seconds=seconds,
            fast_time_share=None if reading is None else _fast_time_share(reading),
            underflow_share=None if reading is None else share_of(reading.numerics, "underflowed"),
            gradient_underflow_share=None if reading is None else share_of(reading.gradients, "underflowed"),
            skip=self._skip,
        )

    @property
    def _reading(self) -> Reading | None:
        return None if self.observed is None else self.observed.reading

    def origin(self, scaler: RecordingGradScaler) -> Origin | None:
        """Return the first op of this step that produced inf or nan, by its observation or by running it again."""
        if not scaler.has_names:
            scaler.name_parameters(self._model)
        reading = self._reading
        found = None if reading is None else reading.first_nonfinite()
        if found is None and self._rerun is not None and self._random is not None:
            found = self._origin_by_rerun(self._rerun, self._random)
        return found or (None if reading is None else _first_overflow(reading))

    def _origin_by_rerun(self, rerun: Callable[[], Any], random: SameRandomNumbers) -> Origin | None:
        try:
            return rerun_step(rerun, self._model, random)
        except Exception as error:  # a diagnosis must not end the run
            warn_user(f"the rerun of a skipped step failed: {type(error).__name__}: {error}")
            return None

    def updated(self, scaler: RecordingGradScaler, scale: float | None, skip: SkippedStep | None) -> None:
        """Note the scale, and whether the step was skipped: by any scaler, if it has several or several updates."""
        if scale is None:
            return
        self._scale = scale
        self._skipped = bool(self._skipped) or skip is not None
        if skip is not None and self._skip is not None:
            skip = _joined(self._skip, skip)
        self._skip = skip or self._skip


def _fast_time_share(reading: Reading) -> float | None:
    """Return the share of the time in ops that ops in the fast dtypes of the step's regions took."""
    fast = {row.fast for row in reading.counts if row.device is not None}
    fast |= {region.dtype for region in reading.regions if region.enabled}
    seconds = [each for row in reading.counts for each in row.seconds]
    total = sum(time for _, time in seconds)
    in_fast = sum(time for dtype, time in seconds if dtype in fast - {None, torch.float32})
    return in_fast / total if total else None


def _first_overflow(reading: Reading) -> Origin | None:
    """Return an op with an overflow: of the first module in the forward pass, else of the last in backward."""
    overflows = sorted((row for row in reading.numerics if row.overflowed), key=lambda row: (row.op, row.of))
    if not overflows:
        return None
    forward = [row for row in overflows if not row.backward]
    first = (min if forward else max)(forward or overflows, key=lambda row: row.module)
    module = reading.name_of(first.module)
    return Origin(first.op, phase_of(first.backward), module, "inf or nan", dtype_name(first.dtype))


def _joined(first: SkippedStep, second: SkippedStep) -> SkippedStep:
    """Return what is known of a step that two scalers skipped."""
    return replace(
        first,
        parameters=(*first.parameters, *second.parameters)[:MAX_NAMES],
        count=(first.count or 0) + (second.count or 0),
        of=(first.of or 0) + (second.of or 0),
        origin=first.origin or second.origin,
    )
