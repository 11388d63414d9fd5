"""The benchmarks by name, with the function that makes each and its numbers of threads.

`python -m benchmarks.catalog NAME [quick]` runs one on OMP_NUM_THREADS threads, and prints its results as JSON. A
benchmark that takes numbers of threads gets them as further arguments.
"""

import json
import os
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from .apart import Apart
from .scores import Scores
from .timing import Result


class Benchmark(Protocol):
    """The result of a function of the catalog."""

    def run(self, quick: bool) -> Sequence[Result | Scores]: ...


def one() -> tuple[int, ...]:
    """Return one thread, for benchmarks that are too short for more, or start threads of their own."""
    return (1,)


def all_of_them() -> tuple[int, ...]:
    """Return the number of processors of this process."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,)


def one_and_all() -> tuple[int, ...]:
    """Return 1 and all threads."""
    return tuple(sorted({*one(), *all_of_them()}))


def each() -> tuple[int, ...]:
    """Return 1, 2, 4 and all threads, as far as there are processors: more threads wait for each other by chance."""
    (most,) = all_of_them()
    return tuple(sorted({*(number for number in (1, 2, 4) if number < most), most}))


@dataclass(frozen=True)
class Entry:
    """A benchmark.

    Attributes:
        function: the function that makes it, as ``module:function`` of this package.
        threads: returns the numbers of threads.
        apart: whether each library has processes of its own.
        least: whether the least times of all rounds count in these, or the median of the ratios.
        environment: variables of the process that runs it.
        takes_threads: whether one process measures all numbers of threads, which the function takes.
    """

    function: str
    threads: Callable[[], tuple[int, ...]]
    apart: bool = False
    least: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_threads: bool = False

    def make(self, *threads: int) -> Benchmark:
        """Return the benchmark, for the threads of this process or, if it takes them, for these numbers."""
        name = f"{__package__}.{self.function}"
        taken = [threads] if self.takes_threads else []
        made: Benchmark = Apart(name, self.least) if self.apart else pkgutil.resolve_name(name)(*taken)
        return made


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Limit torch to the instructions that most laptops have."""

BENCHMARKS: Mapping[str, Entry] = {
    "small": Entry("small:eager", one, apart=True, least=True),
    "ops": Entry("ops:against_torch", each, apart=True, least=True),
    "match": Entry("matched:Matched", one),
    "policy": Entry("small:policy", one),
    "policy-ops": Entry("ops:under_policy", one),
    "depth": Entry("small:depth", one),
    "crowd": Entry("small:threads", one),
    "lookup": Entry("small:lookup", one),
    "leaving": Entry("small:leaving", one),
    "out-dtype": Entry("small:out_dtype", all_of_them),
    "import": Entry("processes:ImportTime", one),
    "memory": Entry("processes:PeakMemory", all_of_them),
    "observing": Entry("observing:ops", one),
    "observing-training": Entry("observing:training", all_of_them),
    "numerics": Entry("numerics:training", each),
    "once": Entry("once:by_size", one, apart=True, least=True),
    "rates": Entry("once:rates", each, apart=True),
    "peak": Entry("once:PeakOfThreads", one),
    "scenarios": Entry("scenarios:scenarios", each, apart=True, least=True),
    "compiled": Entry("compiled:inference", each),
    "compiled-training": Entry("compiled:training", all_of_them),
    "compiled-memory": Entry("compiled:Memory", all_of_them),
    "tuned": Entry("tuned:tuned", all_of_them),
    "low-bit": Entry("low_bit:eager", each),
    "int4": Entry("int4:races", each),
    "families": Entry("families:Families", all_of_them),
    "low-bit-call": Entry("low_bit:Call", one),
    "low-bit-compiled": Entry("low_bit:compiled", all_of_them),
    "fastest": Entry("fastest:Fastest", each),
    "fastest-avx2": Entry("fastest:with_avx2", one_and_all, environment=AVX2),
    "few-rows": Entry("few_rows:races", each),
    "llama-cpp": Entry("llama:LlamaCpp", each, takes_threads=True),
    "llama-compiled": Entry("llama:Compiled", each, takes_threads=True),
    "gpu": Entry("gpu:Gpu", one),
    "fastest-memory": Entry("fastest:Memory", all_of_them),
    "occupied": Entry("occupied:Occupied", all_of_them),
    "serving": Entry("serving:Serving", all_of_them),
    "accuracy": Entry("accuracy:Accuracy", all_of_them),
    "quality": Entry("quality:Quality", all_of_them),
}


def measure(name: str, *threads: int, quick: bool) -> tuple[list[Result], list[Scores]]:
    """Run a benchmark in a process with a number of threads; return its figures and its scores.

    A benchmark that takes numbers of threads gets all of them, and its process has the most.
    """
    command = [sys.executable, "-m", __name__, name, "quick" if quick else "", *map(str, threads)]
    environment = {**os.environ, **BENCHMARKS[name].environment, "OMP_NUM_THREADS": str(max(threads))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    said: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return [Result(**each) for each in said["results"]], [Scores(**each) for each in said["accuracy"]]


def _run(name: str, quick: str = "", *numbers: str) -> None:
    found = BENCHMARKS[name].make(*map(int, numbers)).run(bool(quick))
    threads = torch.get_num_threads()
    results = [asdict(replace(each, threads=each.threads or threads)) for each in found if isinstance(each, Result)]
    print(json.dumps({"results": results, "accuracy": [asdict(each) for each in found if isinstance(each, Scores)]}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _run(*sys.argv[1:])
