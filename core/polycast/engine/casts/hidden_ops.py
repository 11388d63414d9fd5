"""Watch ops that write weights and change no version: in handlers of dispatch modes, and in graphs of devices.

torch counts no versions below the key at which dispatch modes run. And a graph of a device, which has captured a part
of the program or a whole training step, repeats its writes at each replay, without Python.
"""

import functools
import sys
from typing import Any, Protocol

import torch

from ...torch_internals.patcher import Patch, method_of
from ..disable_dynamo import disable_dynamo


class Capture(Protocol):
    """Notes what is written while a graph is captured."""

    def end(self) -> None:
        """Note that the capture has ended."""

    def note_replay(self) -> None:
        """Drop what is cached of the weights that a replay writes."""


class HiddenOps(Protocol):
    """Receives modes, captures and replays: the part of each engine."""

    def enter_mode(self) -> None:
        """Note that this thread has entered a dispatch mode."""

    def leave_mode(self) -> None:
        """Note that it has left one."""

    def begin_capture(self) -> Capture | None:
        """Note what is written from now on; None if the engine cannot."""

    def note_writes(self, tensors: None, /) -> None:
        """Drop what is cached of all weights: any may have been written."""


_told: HiddenOps | None = None
_GRAPHS = (
    ("torch.cuda.graphs", "CUDAGraph"),
    ("torch.xpu.graphs", "XPUGraph"),
    ("torch.mtia.mtia_graph", "MTIAGraph"),
    ("torch.accelerator.graphs", "Graph"),
)


def tell_of_hidden_ops(told: HiddenOps | None) -> None:
    """Set who is told of modes and graphs."""
    global _told
    _told = told


def watch_modes(patch: Patch) -> None:
    """Tell of the dispatch modes that are entered and left, except torch's and polycast's: these write no weights."""
    modes: Any = vars(sys.modules["torch.utils._python_dispatch"])["TorchDispatchMode"]
    enter, leave = method_of(modes, "__enter__", "self"), method_of(modes, "__exit__", "self")

    @functools.wraps(enter)
    @disable_dynamo
    def enter_watched(self: Any) -> Any:
        told = _told_of(self)
        if told is not None:
            told.enter_mode()
        try:
            return enter(self)
        except BaseException:
            if told is not None:
                told.leave_mode()
            raise

    @functools.wraps(leave)
    @disable_dynamo
    def leave_watched(self: Any, *args: Any) -> Any:
        try:
            return leave(self, *args)
        finally:
            told = _told_of(self)
            if told is not None:
                told.leave_mode()

    patch.replace(modes, "__enter__", enter_watched)
    patch.replace(modes, "__exit__", leave_watched)


def _told_of(mode: Any) -> HiddenOps | None:
    writes_nothing = type(mode).__module__.partition(".")[0] in ("torch", "polycast", "polycast_plugins")
    return None if writes_nothing or torch.compiler.is_compiling() else _told


def watch_graphs(patch: Patch) -> None:
    """Tell of captures and replays of graphs. What an earlier graph writes is unknown: its replays drop all casts."""
    for module, name in _GRAPHS:
        graph = getattr(sys.modules.get(module), name, None)
        if graph is not None:
            _watch_graph(patch, graph)


def _watch_graph(patch: Patch, graph: type) -> None:
    begin, end, replay = (method_of(graph, name, "self") for name in ("capture_begin", "capture_end", "replay"))

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._polycast_capture = None if _told is None else _told.begin_capture()

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        try:
            end(self)
        finally:
            capture = getattr(self, "_polycast_capture", None)
            if capture is not None:
                capture.end()

    @functools.wraps(replay)
    def replay_watched(self: Any) -> None:
        try:
            replay(self)
        finally:
            capture = getattr(self, "_polycast_capture", None)
            if capture is not None:
                capture.note_replay()
            elif _told is not None:
                _told.note_writes(None)

    for name, hook in (("capture_begin", capture_begin), ("capture_end", capture_end), ("replay", replay_watched)):
        patch.replace(graph, name, hook)
