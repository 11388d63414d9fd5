"""The demo's checks of its own results."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ...observer.observation import Observation
from ...observer.records import LowBit
from ...policy.dtypes import dtype_name
from .inference_timing import Timing
from .training import FLOAT32, INT8, POLYCAST, TORCH, DemoRun

_FEW_EPOCHS = 2
"""The number of epochs up to which the network is not trained to the end."""

INT8_TOLERANCE = 0.005
"""The largest difference between the accuracies of int8 and float32, of the same network."""

LOSS_TOLERANCE = 1e-4
"""The largest relative difference between the final losses of the two autocasts.

With deterministic algorithms and the same rules they are equal to the last bit. On the cpu, one op in another
precision makes a difference of 1e-3 to 3e-2; after ten steps, of 4e-4.
"""


@dataclass(frozen=True)
class DemoResult:
    """The demo's results on one device.

    Attributes:
        device_type: the device.
        dtype: the fast dtype.
        runs: training, by mode.
        timing: the times of a few large layers.
        seen: the observation of a few training steps.
        accuracies: of the network trained in float32, by mode of inference.
        low_bit: the ops of that network that int8 computed or declined.
        epochs: the number of epochs of training.
    """

    device_type: str
    dtype: torch.dtype
    runs: dict[str, DemoRun]
    timing: Timing
    seen: Observation | None
    accuracies: Mapping[str, float] = field(default_factory=dict)
    low_bit: tuple[LowBit, ...] = ()
    epochs: int = 4

    @property
    def min_accuracy(self) -> float:
        """The least accuracy that is expected of training."""
        return 0.9 if self.epochs <= _FEW_EPOCHS else 0.95

    def loss_difference(self) -> float:
        """Return the relative difference between the final losses of the two autocasts."""
        ours, theirs = self.runs[POLYCAST.name].loss, self.runs[TORCH.name].loss
        return 0.0 if ours == theirs else abs(ours - theirs) / max(abs(ours), abs(theirs))


def problems(result: DemoResult) -> list[str]:
    """Return a sentence for each problem of a result."""
    return [f"{result.device_type}: {problem}" for problem in _problems(result)]


def _problems(result: DemoResult) -> Iterator[str]:
    for run in result.runs.values():
        if not run.accuracy >= result.min_accuracy:  # nan fails
            yield (f"the accuracy of {run.mode} is {run.accuracy:.2%}, expected at least {result.min_accuracy:.0%}")
    if INT8.name in result.accuracies:
        low, full = result.accuracies[INT8.name], result.accuracies[FLOAT32.name]
        if not abs(low - full) <= INT8_TOLERANCE:
            yield (
                f"the accuracy of {INT8.name} is {low:.2%}, and that of float32 {full:.2%} with the same network: "
                f"expected at most {INT8_TOLERANCE * 100:g} points apart"
            )
    ours, theirs = result.runs[POLYCAST.name], result.runs[TORCH.name]
    difference = result.loss_difference()
    if not difference <= LOSS_TOLERANCE:
        yield (
            f"the final losses of torch.autocast ({theirs.loss:.8f}) and polycast.autocast ({ours.loss:.8f}) differ by "
            f"{difference:.1e} of the larger, expected at most {LOSS_TOLERANCE:.0e}"
        )
    for run in (theirs, ours):
        if dtype_name(result.dtype) not in run.dtypes.values():
            yield f"no layer outputs {dtype_name(result.dtype)} under {run.mode}: it had no effect"
    for layer, dtype in theirs.dtypes.items():
        if ours.dtypes[layer] != dtype:
            yield f"{layer} outputs {dtype} under torch.autocast, but {ours.dtypes[layer]} under polycast.autocast"
