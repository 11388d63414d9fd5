"""Time functions in interleaved rounds, so that disturbances of the machine affect all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_TURN = 3e-4
"""The approximate seconds of a turn."""
_MOST_ROUNDS = 12
_MOST_ESTIMATES = 4
_AGREE = 1.1
"""The halves of the rounds disagree if their least times differ by more than this factor."""


@dataclass(frozen=True)
class Timing:
    """The least seconds of a call, and whether the two halves of the rounds disagree about it."""

    seconds: float
    noisy: bool


class Stopwatch:
    """Times functions on a device.

    Args:
        device_type: the device.
        clock: returns seconds.
    """

    def __init__(self, device_type: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._synchronize: Callable[[], object] = getattr(
            getattr(torch, device_type, None), "synchronize", lambda: None
        )
        self._clock = clock

    def time(self, function: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of a call, as a mean over calls in a row."""
        self._synchronize()
        start = self._clock()
        for _ in range(calls):
            function()
        self._synchronize()
        return max(self._clock() - start, 1e-9) / calls

    def estimate(self, function: Callable[[], object], patience: float) -> float:
        """Return the approximate seconds of a call, after calling it a few times, unless that takes over `patience`."""
        taken = [self.time(function)]
        while len(taken) < _MOST_ESTIMATES and sum(taken) < patience:
            taken.append(self.time(function))
        return min(taken)

    def race(
        self, sides: Mapping[str, Callable[[], object]], once: Mapping[str, float], budget: float
    ) -> dict[str, Timing]:
        """Time functions in interleaved rounds. They are repeated where their halves disagree.

        Args:
            sides: the functions.
            once: the approximate seconds of a call of each.
            budget: the seconds to spend, after at least two rounds; repeats may take as long again.
        """
        calls = {name: max(1, round(_TURN / once[name])) for name in sides}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        running, start = list(sides), self._clock()
        for end in (start + budget, start + 2 * budget):
            for number in range(_MOST_ROUNDS):
                for name in running[:: 1 if number % 2 else -1]:
                    taken[name].append(self.time(sides[name], calls[name]))
                if number and self._clock() > end:
                    break
            running = [name for name in running if _disagree(taken[name])]
            if self._clock() > end:
                break
        return {name: Timing(min(each), name in running) for name, each in taken.items()}


def _disagree(seconds: list[float]) -> bool:
    """Return whether the least of every second round differs from the least of the others."""
    one, other = min(seconds[::2]), min(seconds[1::2])
    return max(one, other) > _AGREE * min(one, other)
