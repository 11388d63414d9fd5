"""Races between the kernels of polycast and of torch, with a process for each library.

In one process, kernels would be installed and uninstalled between the turns, and the state of the heap after that
changes the time of an op that allocates much, such as a convolution, by up to a tenth. The two processes still
alternate: one waits while the other runs.

`python -m benchmarks.apart benchmarks.once:rates polycast` is such a process. At "next" it makes the next race and
prints its plan, or null after the last; at "time" it runs a turn of its sides and prints their seconds.
"""

import json
import os
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from .once import LIBRARIES
from .timing import Plan, Ratio, Result


@dataclass(frozen=True)
class Apart:
    """Runs races with the sides of each library in processes of its own, in alternation.

    Each library gets several processes in sequence, because times depend on the addresses that a process gets.
    """

    name: str
    """The function that makes the races: ``module:function``."""
    least: bool = False
    """Whether to use the minimum time of each side over all rounds, or the median of the ratios."""
    processes: int = 3
    keeps_memory: bool = False
    """Whether to make glibc keep freed memory. Otherwise it is chance whether a large tensor gets fresh pages, which
    the system clears: a fifth of the time of a model with a large weight."""

    def run(self, quick: bool) -> list[Result]:
        """Return the results of all races."""
        processes = 1 if quick else self.processes
        plans: list[Plan] = []
        taken: list[list[list[Mapping[str, float]]]] = []
        for _ in range(processes):
            with ExitStack() as stack:
                workers = [stack.enter_context(self._worker(library)) for library in LIBRARIES]
                race = 0
                while all(proposed := [worker.ask("next") for worker in workers]):
                    plan = _merged(proposed)
                    if race == len(plans):
                        plans.append(replace(plan, most_seconds=plan.most_seconds / self.processes))
                        taken.append([])
                    taken[race].append([])
                    for _ in plans[race].turns(quick):
                        workers.reverse()
                        answers = [worker.ask("time") for worker in workers]
                        taken[race][-1].append(answers[0] | answers[1])
                    race += 1
        both = zip(plans, taken, strict=True)
        return [result for plan, pairs in both for result in results_of(plan, pairs, least=self.least)]

    def _worker(self, library: str) -> "Worker":
        return Worker("benchmarks.apart", self.name, library, environment=_KEEP_MEMORY if self.keeps_memory else {})


def results_of(plan: Plan, pairs: Sequence[Sequence[Mapping[str, float]]], *, least: bool = False) -> list[Result]:
    """Return the results of a plan from the rounds of several pairs of processes.

    Times of sides with a base are scaled as if the base had taken its least time in all processes.
    """
    rounds, first, once = list[Mapping[str, float]](), next(iter(plan.bases.values()), ""), plan.once
    common = min((times[first] for taken in pairs for times in taken), default=0.0) if first else 0.0
    for taken in pairs:
        factors = {name: common / min(times[base] for times in taken) for name, base in plan.bases.items()}
        rounds += [{name: each * factors.get(name, 1.0) for name, each in times.items()} for times in taken]
        if taken is pairs[0]:
            once = {name: each * factors.get(name, 1.0) for name, each in once.items()}
    return replace(plan, once=once).results(rounds, least=least)


_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}


class Worker:
    """A process that answers requests: each is a line of its stdin, and the answer a line of JSON."""

    def __init__(self, *command: str, environment: Mapping[str, str]) -> None:
        arguments = [sys.executable, "-m", *command]
        env = {**os.environ, **environment}
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, request: str) -> Any:
        """Return the answer to a request; nothing else runs meanwhile."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(request, file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """Return what the process says next."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}.")
        return json.loads(answer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its stdin, which ends it


def _merged(plans: list[dict[str, Any]]) -> Plan:
    """Merge the plans of both processes: each has the sides that were slow, or left out, there."""
    merged = dict(plans[0])
    for each in ("once", "left_out"):
        merged[each] = {name: value for plan in plans for name, value in plan[each].items()}
    ratios = [Ratio(**each) for each in merged.pop("ratios")]
    return Plan(ratios, **merged)


def _work(name: str, library: str) -> None:
    requests = iter(sys.stdin.readline, "")
    next(requests, None)
    for race in pkgutil.resolve_name(name)().races():
        race, calls = race.warmed_up(name for name, side in race.sides.items() if side.kernels == library)
        print(json.dumps(asdict(race.plan())), flush=True)
        order = list(calls)
        for request in requests:
            if request.strip() == "next":
                break
            print(json.dumps({name: race.sides[name].time(calls[name]) for name in order}), flush=True)
            order.reverse()  # a side may leave the device hot for the next one
        del race  # before the next one is made: it may be large
    print(json.dumps(None), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _work(*sys.argv[1:])
