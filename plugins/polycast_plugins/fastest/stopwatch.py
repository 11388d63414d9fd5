"""Time functions in interleaved rounds, so that changes of the machine's speed affect all of them alike."""

import os
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from polycast.errors import is_interrupt

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_BLOCK_SECONDS = 1e-4
"""The approximate seconds of a block of calls: short, so that some blocks are not preempted on a busy machine."""
_QUEUED_BLOCK_SECONDS = 1e-3
"""The same where calls are queued, and each block waits for the device."""
_LONG = 10
"""A block ends early after this many times that length: on a busy machine a call may take a thousand times as long."""
_MAX_ROUNDS = 40
_MAX_ESTIMATES = 4
_RUNNING = 0.9
"""A block was preempted if a thread of the process was, and this thread ran for less than this part of the time."""
_LOAD_SECONDS = 0.02
_ELEMENTS_OF_THREAD = 2**16
"""Twice the least number of elements that torch gives to a thread."""
_AGREE = 1.25
"""Passes disagree if their two least times differ by more than this factor. A processor that virtual
machines share may be slower by less than that for a second, for all ways alike."""


class Stopwatch:
    """Times functions on a device, by a clock that returns seconds; `is_queued` if calls are queued there."""

    def __init__(self, device_type: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_queued = _can_synchronize(device_type)
        self._synchronize: Callable[[], object] = torch.accelerator.synchronize if self.is_queued else lambda: None
        self._block_seconds = _QUEUED_BLOCK_SECONDS if self.is_queued else _BLOCK_SECONDS
        self._clock = clock
        self._step = 1

    def time(self, function: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of a call, as a mean over calls in a row; over fewer if they take long."""
        self._synchronize()
        start = self._clock()
        done = 0
        while done < calls and (not done or self._clock() - start < _LONG * self._block_seconds):
            function()
            done += 1
        self._synchronize()
        return max(self._clock() - start, 1e-9) / done

    def estimate(self, function: Callable[[], object], patience: float) -> tuple[float, bool]:
        """Return the approximate seconds of a call, and whether it was preempted each time.

        It is called a few times, unless that takes over `patience`.
        """
        every: list[float] = []
        uninterrupted: list[float] = []
        while not every or (len(every) < _MAX_ESTIMATES and sum(every) < patience):
            watch = PreemptionWatch()
            every.append(self.time(function))
            if not watch.was_preempted():
                uninterrupted.append(every[-1])
        return min(uninterrupted or every), not uninterrupted

    def time_interleaved(
        self, functions: Mapping[str, Callable[[], object]], once: Mapping[str, float], budget: float
    ) -> dict[str, list[float] | Exception]:
        """Return the seconds of a call of each function, in each round where it was not preempted, or what it raised.

        There is at least one round, and a block of calls of each function in a round. Every second round, also over
        several calls of this method, has the reverse order. A function that raises an exception is not called again.

        Where one thread is preempted, the others wait for it: a call may take a thousand times as long, in each round
        alike. `once` are the approximate seconds of a call of each, and `budget` those to spend.
        """
        calls = {name: max(1, round(self._block_seconds / once[name])) for name in functions}
        taken: dict[str, list[float]] = {name: [] for name in functions}
        raised: dict[str, Exception] = {}
        end = self._clock() + budget
        for _ in range(_MAX_ROUNDS):
            self._step = -self._step
            for name in [each for each in functions if each not in raised][:: self._step]:
                watch = PreemptionWatch()
                try:
                    seconds = self.time(functions[name], calls[name])
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    raised[name] = error
                    continue
                if not watch.was_preempted():
                    taken[name].append(seconds)
            if self._clock() > end:
                break
        return {**taken, **raised}


class PreemptionWatch:
    """Whether the system has given the processor of a thread of this process to others since this was made."""

    def __init__(self) -> None:
        self._switches = _involuntary_switches()
        self._wall, self._thread = time.monotonic(), time.thread_time()

    def was_preempted(self) -> bool:
        """Return whether threads of the process were preempted, and this one lost time."""
        if _involuntary_switches() == self._switches:
            return False
        return time.thread_time() - self._thread < _RUNNING * (time.monotonic() - self._wall)


def _involuntary_switches() -> int:
    """Return how often threads of this process were preempted; 0 if the system does not count that."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def load_of_others() -> float:
    """Return the part of the processors' time that other processes or a limit took while all threads of torch computed.

    It compares the processor time of this process with the time that passed. 0 to 1; up to 0.05 on an idle machine.
    """
    x = torch.full((torch.get_num_threads() * _ELEMENTS_OF_THREAD,), 1.5, device="cpu")
    result = torch.empty_like(x)
    wall, processor = time.monotonic(), time.process_time()
    while time.monotonic() - wall < _LOAD_SECONDS:
        torch.lgamma(x, out=result)  # much work for little memory
    passed, processors = time.monotonic() - wall, min(torch.get_num_threads(), _available_processors())
    return max(0.0, 1 - (time.process_time() - processor) / (passed * processors))


def _available_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _can_synchronize(device_type: str) -> bool:
    """Return whether calls are queued on the device, so that a block has to wait for them."""
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
