"""Write the times of ops and casts as a Chrome trace, which Perfetto opens, alone or beside torch.profiler's events.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from polycast.plugin import dtype_name

from .recorder import EventRow, ModuleName, Recorder, phase_of

MAX_EVENTS = 1_000_000
_TRACKS = 1_000_000_000
"""The first number of polycast's tracks: higher than those of threads."""


@runtime_checkable
class TorchProfile(Protocol):
    """A ``torch.profiler.profile`` that has stopped."""

    def export_chrome_trace(self, path: str) -> Any:
        """Write the trace to a file."""


ProfileLike: TypeAlias = TorchProfile | str | os.PathLike[str]


@dataclass(frozen=True)
class Trace:
    """The ops and casts of an observation in the order in which they ended, and how many are missing."""

    events: tuple[EventRow, ...]
    modules: tuple[str, ...]
    dropped: int


def trace_of(recorder: Recorder, modules: Sequence[ModuleName]) -> Trace:
    """Return the trace of a recorder that has stopped."""
    events, dropped = recorder.events()
    return Trace(tuple(events), tuple(module.name for module in modules), dropped)


def write_trace(trace: Trace, path: str | os.PathLike[str], profile: ProfileLike | None) -> None:
    """Write a trace; see ``Observation.to_trace``."""
    alone: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    whole = alone if profile is None else _read_profile(profile)
    base = whole.setdefault("baseTimeNanoseconds", _begin(trace.events) if profile is None else 0)
    if profile is not None:
        _check_overlap(trace.events, whole["traceEvents"], base)
    process = _process_of(whole["traceEvents"])
    whole["traceEvents"] += _events(trace, base, process, with_ops=profile is None)
    if trace.dropped:
        whole["polycastEventsNotKept"] = trace.dropped
    text = json.dumps(whole, separators=(",", ":"))
    if os.fspath(path).endswith(".gz"):
        Path(path).write_bytes(gzip.compress(text.encode()))
    else:
        Path(path).write_text(text, encoding="utf-8")


def _begin(events: Iterable[EventRow]) -> int:
    return min((event.began for event in events), default=0)


def _events(trace: Trace, base: int, process: int, *, with_ops: bool) -> Iterator[dict[str, Any]]:
    tracks: dict[tuple[int, bool], int] = {}
    for event in trace.events:
        if event.is_cast or with_ops:
            track = tracks.setdefault((event.thread, event.is_cast), _TRACKS + len(tracks))
            yield _event(event, trace.modules, base) | {"pid": process, "tid": track}
    if with_ops:
        yield _metadata("process_name", process, 0, {"name": "polycast"})
    for (thread, is_cast), track in tracks.items():
        what = "casts by polycast" if is_cast else "ops"
        yield _metadata("thread_name", process, track, {"name": f"{what}, thread {thread}"})
        yield _metadata("thread_sort_index", process, track, {"sort_index": thread})  # next to the thread's own


def _event(event: EventRow, modules: Sequence[str], base: int) -> dict[str, Any]:
    module = modules[event.module] if 0 <= event.module < len(modules) else None
    arguments: dict[str, Any] = {"phase": phase_of(event.backward), "module": module}
    if event.is_cast:
        verb = "cached cast" if event.is_hit else "cast"
        name = f"{verb} {_dtype(event.source)} to {_dtype(event.dtype)}"
        of = "weight" if event.of_weight else "activation"
        arguments |= {"op": event.op, "of": of, "bytes": event.bytes}
    else:
        name = event.op
        arguments |= {"computes_in": None if event.dtype is None else _dtype(event.dtype)}
    return {
        "ph": "X",
        "cat": "polycast_cast" if event.is_cast else "polycast_op",
        "name": name,
        "ts": (event.began - base) / 1000,
        "dur": event.duration / 1000,
        "args": {key: value for key, value in arguments.items() if value is not None},
    }


def _dtype(dtype: torch.dtype | None) -> str:
    return "an unknown dtype" if dtype is None else dtype_name(dtype)


def _metadata(name: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _read_profile(profile: ProfileLike) -> dict[str, Any]:
    if isinstance(profile, (str, os.PathLike)):
        path = Path(profile)
        return _parsed(path, path.name)
    if not isinstance(profile, TorchProfile):
        raise TypeError(
            "profile must be a torch.profiler.profile or the path of a trace that it has exported, got "
            f"{type(profile).__name__}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        try:
            profile.export_chrome_trace(str(path))
        except RuntimeError as error:
            raise ValueError(
                f"the profile cannot be exported: {error} torch exports a profile once; if that is done, pass the path "
                "of the file."
            ) from error
        return _parsed(path, "the profile")


def _parsed(path: Path, name: str) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        whole = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = whole["traceEvents"]
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise TypeError("traceEvents is not a list of events")
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise ValueError(
            f"{name} is not a Chrome trace of torch.profiler: {type(error).__name__}: {error}. Pass what "
            "export_chrome_trace wrote."
        ) from error
    return dict(whole)


def _check_overlap(events: Sequence[EventRow], others: Iterable[dict[str, Any]], base: int) -> None:
    times = [
        (event["ts"] * 1000 + base, (event["ts"] + event.get("dur", 0)) * 1000 + base)
        for event in others
        if event.get("ph") == "X" and isinstance(event.get("ts"), (int, float))
    ]
    if not times or not events:
        return
    first, last = min(begin for begin, _ in times), max(end for _, end in times)
    if _begin(events) > last or max(event.began + event.duration for event in events) < first:
        raise ValueError("the profile has no event in the time of the observation. Profile and observe the same block.")


def _process_of(events: Iterable[dict[str, Any]]) -> int:
    """Return the process of the ops in a profile; of this one without a profile."""
    processes = (event.get("pid") for event in events if event.get("cat") == "cpu_op")
    return next((process for process in processes if isinstance(process, int)), os.getpid())
