"""Time the demo's network at inference, in all modes side by side."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .digits import Digits, network
from .training import Mode, inference_modes

ROUNDS = 12
_SECONDS = 0.05
"""What a mode's turn takes: far longer than calls are slow after the kernels were changed for it."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a call by the name of its mode, for each of several rounds; `images` is how many a call is given."""

    images: int
    rounds: tuple[Mapping[str, float], ...]

    def median(self, mode: Mode) -> float:
        """Return the median seconds of a call."""
        return statistics.median(times[mode.name] for times in self.rounds)

    def ratio(self, mode: Mode, to: Mode) -> float:
        """Return the median over the rounds of how long a call takes, as a multiple of a call in another mode."""
        return statistics.median(times[mode.name] / times[to.name] for times in self.rounds)


def time_inference(
    device_type: str, dtype: torch.dtype, digits: Digits, images: int, advance: Callable[[], object]
) -> Timing:
    """Time a call of the network on a number of test images; the modes take turns, and who is first changes.

    A call is what a user waits for: region entry, forward, and the answer on the host.
    """
    model = network(device_type).eval()
    batch = digits.test_images[:images]
    modes = inference_modes(device_type)

    def call(mode: Mode) -> None:
        with torch.inference_mode(), mode.region(device_type, dtype):
            answer = model(batch)
        answer.argmax(1).cpu()

    rounds = []
    for turn in range(ROUNDS):
        times = {}
        first = turn % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            mode.use_kernels(device_type)
            call(mode)
            calls, seconds, start = 0, 0.0, time.perf_counter()
            while seconds < _SECONDS:
                call(mode)
                calls, seconds = calls + 1, time.perf_counter() - start
            times[mode.name] = seconds / calls
        rounds.append(times)
        advance()
    return Timing(images, tuple(rounds))
