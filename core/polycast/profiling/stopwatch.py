"""Time functions in interleaved rounds, so that disturbances of the machine affect all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

_TURN = 1e-4
"""The approximate seconds of a turn: short, so that some turns are undisturbed on a busy machine."""
_ACCELERATOR_TURN = 1e-3
"""The same where calls are queued, and each turn waits for the device."""
_MOST_ROUNDS = 40
_MOST_ESTIMATES = 4
_AGREE = 1.1
"""The halves of the rounds disagree if their least times differ by more than this factor."""


class Stopwatch:
    """Times functions on a device.

    Args:
        device_type: the device.
        clock: returns seconds.
    """

    def __init__(self, device_type: str, clock: Callable[[], float] = time.perf_counter) -> None:
        accelerator = torch.accelerator.current_accelerator()
        is_accelerator = accelerator is not None and accelerator.type == device_type
        self._synchronize: Callable[[], object] = torch.accelerator.synchronize if is_accelerator else lambda: None
        self._turn = _ACCELERATOR_TURN if is_accelerator else _TURN
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
    ) -> dict[str, list[float]]:
        """Return the seconds of a call of each function, in each of at least two interleaved rounds.

        Args:
            sides: the functions.
            once: the approximate seconds of a call of each.
            budget: the seconds to spend.
        """
        calls = {name: max(1, round(self._turn / once[name])) for name in sides}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        end = self._clock() + budget
        for number in range(_MOST_ROUNDS):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                taken[name].append(self.time(sides[name], calls[name]))
            if number and self._clock() > end:
                break
        return taken


def disagree(seconds: Sequence[float]) -> bool:
    """Return whether the least of every second round differs from the least of the others, or there are none."""
    if len(seconds) < 2:
        return True
    one, other = min(seconds[::2]), min(seconds[1::2])
    return max(one, other) > _AGREE * min(one, other)
