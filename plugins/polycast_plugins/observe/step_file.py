"""`StepFile`: the file of JSON lines that a RunLog writes while the run goes on."""

import os
import warnings
from pathlib import Path

import torch

from .step_record import StepRecord, line_of, records_of, without_lost_steps


class StepFile:
    """A file of JSON lines, one for each step.

    A step that cannot be written, because the disk is full, is kept in memory and written after the next one.

    Args:
        path: the file. In a process of rank 1 of a distributed run, ``run.jsonl`` becomes ``run.rank1.jsonl``.

    Raises:
        ValueError: the folder does not exist, or the path is one.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir() or not path.parent.is_dir():
            wrong = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
            raise ValueError(f"{path} {wrong}. Name a file in a folder that exists, such as run.jsonl.")
        rank = _rank()
        self.path = path if rank in ("", "0") else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._unwritten: list[StepRecord] = []

    def open(self, *, resume: bool) -> int:
        """Prepare the file for the first step, and return the number of steps in it.

        Raises:
            FileExistsError: it has steps, and is not to be resumed.
            OSError: it cannot be written.
        """
        if not resume and self.path.exists() and self.path.stat().st_size:
            raise FileExistsError(
                f"{self.path} has the steps of a run. To continue it, pass resume=True or load the state of the "
                "log from the checkpoint; else name another file or delete it."
            )
        with self.path.open("ab"):
            pass
        records = self.read()
        self._end_last_line()
        return records[-1].step + 1 if records else 0

    def _end_last_line(self) -> None:
        """Complete or remove the last line if the process was killed as it wrote that."""
        with self.path.open("r+b") as file:
            data = file.read()
            start = data.rfind(b"\n") + 1
            if list(records_of([data[start:].decode("utf-8", "replace")])):
                file.write(b"\n")
            else:
                file.truncate(start)

    def read(self) -> list[StepRecord]:
        """Return the steps so far.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not a step.
        """
        written: list[StepRecord] = []
        if self.path.exists():
            with self.path.open(encoding="utf-8") as lines:
                written = list(records_of(lines))
        return without_lost_steps([*written, *self._unwritten])

    def append(self, record: StepRecord) -> None:
        """Write a step, or keep it and warn if that is not possible."""
        self._unwritten.append(record)
        data = "".join(map(line_of, self._unwritten)).encode()
        try:
            _append(self.path, data)
        except OSError as error:
            if len(self._unwritten) == 1:
                warnings.warn(
                    f"{self.path} cannot be written: {error.strerror or error}. The run goes on; its steps are kept in "
                    "memory until there is room.",
                    stacklevel=2,
                )
        else:
            self._unwritten.clear()


def _append(path: Path, data: bytes) -> None:
    """Append all of the data or nothing; the file is closed at once, because a log has no end."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(end)
            raise


def _rank() -> str:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK", "")
