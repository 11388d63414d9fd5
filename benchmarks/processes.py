"""Measurements in processes of their own: import time and peak memory."""

import statistics
import subprocess
import sys
from dataclasses import dataclass

from .timing import Result

_IMPORT = "import time, torch; start = time.perf_counter(); import polycast; print(time.perf_counter() - start)"


def _output(*arguments: str) -> float:
    return float(subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout)


@dataclass(frozen=True)
class ImportTime:
    """The milliseconds of ``import polycast`` after ``import torch``."""

    rounds: int = 9

    def run(self, quick: bool) -> list[Result]:
        """Return the median of all rounds."""
        seconds = [_output("-c", _IMPORT) for _ in range(3 if quick else self.rounds)]
        return [Result("import polycast, after import torch", "-", statistics.median(seconds) * 1000, 15, unit=" ms")]


@dataclass(frozen=True)
class PeakMemory:
    """The peak memory of a training process."""

    rounds: int = 2

    def run(self, quick: bool) -> list[Result]:
        """Return the median of all rounds."""
        ratios = []
        for _ in range(1 if quick else self.rounds):
            ours, theirs = (_output("-m", "benchmarks.training", name) for name in ("polycast", "torch"))
            ratios.append(ours / theirs)
        what = "GPT-2 small, peak memory of the training step"
        return [Result(what, "torch.autocast", statistics.median(ratios), 1.02)]
