"""Regions that use each weight once: time by size, time with concurrent callers, and peak memory.

`python -m benchmarks.once polycast frozen 4` is the process whose memory is measured: library, weights and threads.
"""

import functools
import itertools
import resource
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import polycast

from .timing import Race, Ratio, Result, Several, Side

NOT_SLOWER = 1.02
"""torch's time, with a margin for noise."""
LIBRARIES = {"polycast": polycast, "torch": torch}
KINDS = {"frozen": False, "trainable": True}


def duel(what: str, forward: Callable[[], object], at_most: float, around: Any = nullcontext, **race: Any) -> Race:
    """Return a race of one forward pass in a region of each library, entered for each pass."""
    statement = "with autocast('cpu'): forward()"
    sides = {
        name: Side(statement, {"autocast": amp.autocast, "forward": forward}, around, kernels=name)
        for name, amp in LIBRARIES.items()
    }
    return Race(sides=sides, ratios=[Ratio(what, "torch.autocast", "polycast", "torch", at_most)], **race)


def _linears(count: int, size: int, *, trainable: bool) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(count))).requires_grad_(trainable)


def _by_size() -> Iterator[Race]:
    grad: dict[str, Callable[[], AbstractContextManager[Any]]] = {"no_grad": torch.no_grad, "grad": torch.enable_grad}
    for size, kind, mode in itertools.product((8, 64, 256, 512, 1024, 2048), KINDS, grad):
        model, x = _linears(4, size, trainable=KINDS[kind]), torch.randn(4, size)
        what = f"4 x Linear({size}, {size}), batch 4, {kind}, {mode}"
        yield duel(what, functools.partial(model, x), NOT_SLOWER, grad[mode], rounds=20)


by_size = functools.partial(Several, _by_size)


def _rate(amp: Any, model: torch.nn.Module, x: torch.Tensor, threads: int) -> Callable[[], None]:
    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(max(1, 64 // threads)):
                with amp.autocast("cpu"):
                    model(x)

    pool = ThreadPoolExecutor(threads)
    return lambda: [None for _ in pool.map(work, range(threads))] and None


def _rates() -> Iterator[Race]:
    model, x = _linears(12, 512, trainable=False), torch.randn(4, 512)
    for threads in (1, 2, 8, 32):
        if threads > 1 and torch.get_num_threads() > 1:  # their teams would compete for the processors
            return
        sides = {
            name: Side("work()", {"work": _rate(amp, model, x, threads)}, kernels=name)
            for name, amp in LIBRARIES.items()
        }
        what = f"12 x Linear(512, 512), frozen, called by {threads} at once: time of a forward"
        yield Race(sides=sides, ratios=[Ratio(what, "torch.autocast", "polycast", "torch", NOT_SLOWER)], rounds=8)


rates = functools.partial(Several, _rates)


@dataclass(frozen=True)
class PeakOfThreads:
    """The peak memory of a process whose threads run one model, minus that with torch.autocast."""

    rounds: int = 1

    def run(self, quick: bool) -> list[Result]:
        """Return the results of all rounds."""
        results = []
        for kind, threads in itertools.product(KINDS, (1, 4, 16)):
            peaks: dict[str, list[float]] = {name: [] for name in LIBRARIES}
            for _ in range(1 if quick else self.rounds):
                for name, measured in peaks.items():
                    command = [sys.executable, "-m", "benchmarks.once", name, kind, str(threads)]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    measured.append(float(done.stdout))
            more = statistics.median(peaks["polycast"]) - statistics.median(peaks["torch"])
            what = f"16 x Linear(2048, 2048), {kind}, called by {threads} at once: peak memory, more than"
            results.append(Result(what, "torch.autocast", more, 2 * 2048 * 2048 * 4 / 2**20, unit=" MiB"))
        return results


def _peak(library: str, kind: str, threads: int) -> float:
    """Return the MiB that forward passes add to the peak memory of this process."""
    torch.set_num_threads(1)
    model, x, amp = _linears(16, 2048, trainable=KINDS[kind]), torch.randn(4, 2048), LIBRARIES[library]
    with torch.no_grad(), amp.autocast("cpu"):
        torch.nn.Linear(8, 8)(torch.randn(1, 8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    together = threading.Barrier(threads)

    def work(_: int) -> None:
        together.wait()
        for _ in range(4):
            with torch.no_grad(), amp.autocast("cpu"):
                model(x)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    print(_peak(sys.argv[1], sys.argv[2], int(sys.argv[3])))
