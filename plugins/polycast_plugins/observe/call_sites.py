"""Find the lines of the program that call torch or polycast: the stack without the frames of either."""

import os
import sys
from pathlib import Path
from types import FrameType

import torch

from polycast.engine.disable_dynamo import disable_dynamo

_MAX_LINES = 32
_EXCLUDED = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent.parent) + os.sep,
    str(Path(os.__file__).with_name("contextlib.py")),
)


def call_stack() -> tuple[str, ...]:
    """Return the program's lines on this thread's stack, innermost last, as ``"file.py:12 function"``."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(found) < _MAX_LINES:
        if not frame.f_code.co_filename.startswith(_EXCLUDED):
            found.append(f"{_line(frame)} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


@disable_dynamo
def call_site(region: object) -> tuple[str, bool]:
    """Return the innermost of these lines, as ``"file.py:12"``, and whether a module rule opened the region."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_EXCLUDED):
        frame = frame.f_back
    return "" if frame is None else _line(frame), hasattr(region, "module_rule")


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    try:
        directory = os.getcwd() + os.sep
    except OSError:  # it was removed
        directory = ""
    line = f"{file.removeprefix(directory)}:{frame.f_lineno}"
    return line.encode("utf-8", "backslashreplace").decode("utf-8")  # file names need not be valid Unicode
