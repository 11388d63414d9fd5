"""What the demo demands of its own result."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ...observer.observation import Observation
from ...observer.records import LowBit
from ...policy.dtypes import dtype_name
from .timing import Timing
from .training import FLOAT32, INT8, POLYCAST, TORCH, Run

MIN_ACCURACY = 0.95

INT8_LOSES = 0.005
"""How far the part of the images that int8 gets right may be from float32's, of the same network."""

LOSS_TOLERANCE = 1e-4
"""How far the final losses of the two autocasts may be apart, as a part of the larger.

With deterministic algorithms and the same rules they are equal to the last bit. One op of the network in another
precision sets them 1e-3 to 3e-2 apart on the cpu, and 4e-4 after no more than ten steps.
"""


@dataclass(frozen=True)
class Result:
    """What the demo found on one device.

    There is a run for each mode, by the mode's name; the times of a few large layers; and what was observed.

    `accuracies` are those of the network that was trained in float32, by the name of the mode of inference.
    `low_bit` is what int8 computed of it, and what it declined.
    """

    device_type: str
    dtype: torch.dtype
    runs: dict[str, Run]
    timing: Timing
    seen: Observation | None
    accuracies: Mapping[str, float] = field(default_factory=dict)
    low_bit: tuple[LowBit, ...] = ()

    def loss_difference(self) -> float:
        """Return how far the final losses of the two autocasts are apart, as a part of the larger."""
        ours, theirs = self.runs[POLYCAST.name].loss, self.runs[TORCH.name].loss
        return 0.0 if ours == theirs else abs(ours - theirs) / max(abs(ours), abs(theirs))


def problems(result: Result) -> list[str]:
    """Say what is wrong with a result: a sentence for each problem, none where all is as it should be."""
    return [f"{result.device_type}: {problem}" for problem in _problems(result)]


def _problems(result: Result) -> Iterator[str]:
    for run in result.runs.values():
        # Written so that what is not a number fails.
        if not run.accuracy >= MIN_ACCURACY:
            yield (
                f"{run.mode} gets {run.accuracy:.2%} of the test images right, at least {MIN_ACCURACY:.0%} was expected"
            )
    if INT8.name in result.accuracies:
        low, full = result.accuracies[INT8.name], result.accuracies[FLOAT32.name]
        if not abs(low - full) <= INT8_LOSES:
            yield (
                f"{INT8.name} gets {low:.2%} of the test images right, and float32 {full:.2%} with the same network: "
                f"at most {INT8_LOSES * 100:g} points apart was expected"
            )
    ours, theirs = result.runs[POLYCAST.name], result.runs[TORCH.name]
    difference = result.loss_difference()
    if not difference <= LOSS_TOLERANCE:
        yield (
            f"the final losses of torch.autocast ({theirs.loss:.8f}) and polycast.autocast ({ours.loss:.8f}) differ by "
            f"{difference:.1e} of the larger, at most {LOSS_TOLERANCE:.0e} was expected"
        )
    for run in (theirs, ours):
        if dtype_name(result.dtype) not in run.dtypes.values():
            yield f"no layer puts out {dtype_name(result.dtype)} under {run.mode}: it was not in force"
    for layer, dtype in theirs.dtypes.items():
        if ours.dtypes[layer] != dtype:
            yield f"{layer} puts out {dtype} under torch.autocast, but {ours.dtypes[layer]} under polycast.autocast"
