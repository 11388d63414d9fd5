"""Observing a program under ``polycast run``, and the processes that it starts."""

import atexit
import multiprocessing
import multiprocessing.util
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from polycast import observe
from polycast_plugins.observe import Observation, observe_program


@dataclass(frozen=True)
class ObservedOutput:
    """The output of each observed process.

    Attributes:
        table: print a table on stderr.
        report: the file of the first process's report; None: no report.
        quiet: do not print where the report is.
        since: when the first process started (``time.time()``); older reports belong to other runs.
    """

    table: bool = False
    report: str | None = None
    quiet: bool = False
    since: float = field(default_factory=time.time)


def _columns() -> int:
    """Return how many columns the terminal has that stderr is, or COLUMNS says; without either, no limit."""
    columns = 0
    with suppress(OSError, ValueError):
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(2).columns)
    return columns if columns > 0 else sys.maxsize


class ObservedProcess:
    """This process and its forks, observed from :meth:`start` until they end."""

    def __init__(self, output: ObservedOutput, *, is_first: bool) -> None:
        self._output = output
        self._is_first = is_first
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._rank = os.environ.get("RANK")
        self._observer: observe | None = observe_program(threads="all", timing=True, stacks=True)

    def start(self) -> None:
        """Start observing."""
        self._enter()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._begin_in_fork)
        # Processes of multiprocessing skip atexit when they end, and clear their finalizers when they start.
        multiprocessing.util.register_after_fork(self, ObservedProcess._end_with_process)

    def _enter(self) -> None:
        assert self._observer is not None
        self._seen: Observation = self._observer.__enter__()

    def _begin_in_fork(self) -> None:
        if self._observer is not None:
            self._observer.__exit__(None, None, None)  # these counts belong to the parent
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
        if self._output.table:
            lines += [f"polycast: observed in {self._name() or 'the program'}", self._seen.text(_columns())]
        if self._output.report is not None:
            path = self._path(Path(self._output.report))
            try:
                self._seen.to_html(path)
            except OSError as error:
                lines.append(f"polycast: the report cannot be written: {error}")
            else:
                lines += [] if self._output.quiet else [f"polycast: report in {path}: {self._seen.headline}"]
        if lines and sys.stderr is not None:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _name(self) -> str:
        """Return the rank of this process, or its name in multiprocessing; empty for the first one."""
        rank = os.environ.get("RANK")
        ranked = [] if rank is None else [f"rank{rank}"]
        if self._is_first or rank != self._rank:  # a process that sets its own rank is not a worker
            return "".join(ranked)
        process = multiprocessing.current_process().name
        return ".".join([*ranked, process if process != "MainProcess" else f"process{self._process}"])

    def _path(self, report: Path) -> Path:
        name = re.sub(r"[^\w.-]", "-", self._name())[:100]
        if not name:
            return report
        path = report.with_name(f"{report.stem}.{name}{report.suffix}")
        is_written = path.exists() and path.stat().st_mtime >= self._output.since
        if is_written and not self._is_first:  # by another process with this name
            path = report.with_name(f"{report.stem}.{name}.{self._process}{report.suffix}")
        return path
