"""Timing a few large layers at inference, in all modes."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .training import Mode, inference_modes

LAYERS, FEATURES, BATCH = 4, 2048, 512
ROUNDS = 6
_SECONDS = 0.05
"""The shortest turn of a mode: far longer than the slow calls after a change of kernels."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a call by mode, for each round."""

    rounds: tuple[Mapping[str, float], ...]

    def median(self, mode: Mode) -> float:
        """Return the median seconds of a call."""
        return statistics.median(times[mode.name] for times in self.rounds)

    def ratio(self, mode: Mode, to: Mode) -> float:
        """Return the median over the rounds of the time of a call divided by that in another mode."""
        return statistics.median(times[mode.name] / times[to.name] for times in self.rounds)


def large_layers(device_type: str) -> nn.Sequential:
    """Return the layers to time."""
    each = (layer for _ in range(LAYERS) for layer in (nn.Linear(FEATURES, FEATURES, device=device_type), nn.GELU()))
    return nn.Sequential(*each).eval()


def time_inference(device_type: str, dtype: torch.dtype, advance: Callable[[], object]) -> Timing:
    """Time a call of the large layers: entering the region, forward, and copying the answer to the host.

    The modes take turns, each round in another order.

    Args:
        device_type: where to run.
        dtype: the fast dtype of the modes that have one.
        advance: called after each round.
    """
    with torch.random.fork_rng(devices=[]):
        model, batch = large_layers(device_type), torch.randn(BATCH, FEATURES).to(device_type)
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
    return Timing(tuple(rounds))
