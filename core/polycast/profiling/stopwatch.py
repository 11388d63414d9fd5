"""Time functions in interleaved rounds, so that disturbances of the machine affect all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_TURN = 1e-4
"""The approximate seconds of a turn: short, so that some turns are undisturbed on a busy machine."""
_QUEUE_TURN = 1e-3
"""The same where calls are queued, and each turn waits for the device."""
_LONG = 10
"""A turn ends early after this many times that length: on a busy machine a call may take a thousand times as long."""
_MAX_ROUNDS = 40
_MAX_ESTIMATES = 4
_RUNNING = 0.9
"""A turn is disturbed if the system stopped a thread of the process and this one ran for a smaller part of it."""
_AGREE = 1.25
"""Passes disagree if their two least times differ by more than this factor. A processor that virtual
machines share may be slower by less than that for a second, for all ways alike."""


class Stopwatch:
    """Times functions on a device.

    Args:
        device_type: the device.
        clock: returns seconds.

    Attributes:
        is_queued: whether calls are queued on the device.
    """

    def __init__(self, device_type: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_queued = _can_synchronize(device_type)
        self._synchronize: Callable[[], object] = torch.accelerator.synchronize if self.is_queued else lambda: None
        self._turn = _QUEUE_TURN if self.is_queued else _TURN
        self._clock = clock
        self._step = 1

    def time(self, function: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of a call, as a mean over calls in a row; over fewer if they take long."""
        self._synchronize()
        start = self._clock()
        done = 0
        while done < calls and (not done or self._clock() - start < _LONG * self._turn):
            function()
            done += 1
        self._synchronize()
        return max(self._clock() - start, 1e-9) / done

    def estimate(self, function: Callable[[], object], patience: float) -> tuple[float, bool]:
        """Return the approximate seconds of a call, and whether it was disturbed each time.

        It is called a few times, unless that takes over `patience`.
        """
        every: list[float] = []
        undisturbed: list[float] = []
        while not every or (len(every) < _MAX_ESTIMATES and sum(every) < patience):
            running = Running()
            every.append(self.time(function))
            if not running.was_stopped():
                undisturbed.append(every[-1])
        return min(undisturbed or every), not undisturbed

    def race(
        self, sides: Mapping[str, Callable[[], object]], once: Mapping[str, float], budget: float
    ) -> dict[str, list[float] | Exception]:
        """Return the seconds of a call of each function, in each undisturbed round, or what it raised.

        There is at least one round. Functions are called in the reverse order in every second round, also of other
        races. One that raises an exception is not called again.

        Where other processes take the processor from one thread, the others wait for it: a call may take a thousand
        times as long, in each round alike.

        Args:
            sides: the functions.
            once: the approximate seconds of a call of each.
            budget: the seconds to spend.
        """
        calls = {name: max(1, round(self._turn / once[name])) for name in sides}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        raised: dict[str, Exception] = {}
        end = self._clock() + budget
        for _ in range(_MAX_ROUNDS):
            self._step = -self._step
            for name in [each for each in sides if each not in raised][:: self._step]:
                running = Running()
                try:
                    seconds = self.time(sides[name], calls[name])
                except Exception as error:
                    raised[name] = error
                    continue
                if not running.was_stopped():
                    taken[name].append(seconds)
            if self._clock() > end:
                break
        return {**taken, **raised}


class Running:
    """Whether the system lets the threads of this process run, from now on."""

    def __init__(self) -> None:
        self._stops = _stops()
        self._wall, self._thread = time.monotonic(), time.thread_time()

    def was_stopped(self) -> bool:
        """Return whether it has stopped threads of the process, and time was lost."""
        if _stops() == self._stops:
            return False
        return time.thread_time() - self._thread < _RUNNING * (time.monotonic() - self._wall)


def _stops() -> int:
    """Return how often the system has taken the processor from a thread of this process; 0 if it does not say."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _can_synchronize(device_type: str) -> bool:
    """Return whether calls are queued on the device, so that a turn has to wait for them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return False
    try:
        torch.accelerator.synchronize()
    except Exception:  # a device without streams; a backend's runtime may raise anything
        return False
    return True


def disagree(passes: Sequence[float]) -> bool:
    """Return whether the two least times of some passes differ, or there are fewer."""
    if len(passes) < 2:
        return True
    least, next_to_it = sorted(passes)[:2]
    return next_to_it > _AGREE * least
