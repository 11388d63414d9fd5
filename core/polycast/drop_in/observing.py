"""Observing a program that nobody changed, and the processes that it starts, each until it ends."""

import atexit
import multiprocessing
import multiprocessing.util
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..observer.headline import headline
from ..observer.observation import Observation
from ..observer.observe import observe, observe_program


@dataclass(frozen=True)
class Wanted:
    """What is to be written of each process.

    Attributes:
        table: a table on stderr.
        report: the file of the report, of the process that was started first; None for no report.
        quiet: no line that says where the report is.
        since: when the first process began, by ``time.time()``: reports that are older are of another run.
    """

    table: bool = False
    report: str | None = None
    quiet: bool = False
    since: float = field(default_factory=time.time)


class ObservedProcess:
    """This process, observed from :meth:`start` until it ends, as are those that it forks."""

    def __init__(self, wanted: Wanted, *, is_first: bool) -> None:
        self._wanted = wanted
        self._is_first = is_first
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._rank = os.environ.get("RANK")
        self._observer: observe | None = observe_program(threads="all", timing=True, stacks=True)

    def start(self) -> None:
        """Observe from now on."""
        self._enter()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._begin_in_fork)
        # A process of multiprocessing, forked or spawned, ends without what is registered with atexit, and as it begins
        # it forgets what its finalizers were.
        multiprocessing.util.register_after_fork(self, ObservedProcess._end_with_process)

    def _enter(self) -> None:
        assert self._observer is not None
        self._seen: Observation = self._observer.__enter__()

    def _begin_in_fork(self) -> None:
        if self._observer is not None:
            self._observer.__exit__(None, None, None)  # what was counted until here is its parent's
        self._is_first = False
        self._begin()
        self._enter()

    def _end_with_process(self) -> None:
        multiprocessing.util.Finalize(None, self._end, exitpriority=-1000)

    def _end(self) -> None:
        if self._observer is None or os.getpid() != self._process:
            return
        self._observer.__exit__(None, None, None)
        self._observer = None
        if not self._is_first and not self._seen.ops:
            return
        lines = []
        if self._wanted.table:
            lines += [f"polycast: observed in {self._name() or 'the program'}", str(self._seen)]
        if self._wanted.report is not None:
            path = self._path(Path(self._wanted.report))
            try:
                self._seen.to_html(path)
            except OSError as error:
                lines.append(f"polycast: the report cannot be written: {error}")
            else:
                lines += [] if self._wanted.quiet else [f"polycast: report in {path}: {headline(self._seen)}"]
        if lines and sys.stderr is not None:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _name(self) -> str:
        """Return the rank of this process, or the name that multiprocessing has for it; nothing for the first one."""
        rank = os.environ.get("RANK")
        ranked = [] if rank is None else [f"rank{rank}"]
        if self._is_first or rank != self._rank:  # a process that sets its rank itself is no worker of another rank
            return "".join(ranked)
        process = multiprocessing.current_process().name
        return ".".join([*ranked, process if process != "MainProcess" else f"process{self._process}"])

    def _path(self, report: Path) -> Path:
        name = re.sub(r"[^\w.-]", "-", self._name())[:100]
        if not name:
            return report
        path = report.with_name(f"{report.stem}.{name}{report.suffix}")
        if not self._is_first and path.exists() and path.stat().st_mtime >= self._wanted.since:  # another of this name
            path = report.with_name(f"{report.stem}.{name}.{self._process}{report.suffix}")
        return path
