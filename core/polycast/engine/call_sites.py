"""Where in the program something happens: the lines of those who call, without those of torch and polycast."""

import os
import sys
from pathlib import Path
from types import FrameType

import torch

from .disable_dynamo import disable_dynamo

BY_MODULE_RULE = " (module rule)"
_RULED_FORWARD = "ruled_forward.py"
_MOST = 32
_NOT_THE_PROGRAM = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent.parent) + os.sep,
    str(Path(os.__file__).with_name("contextlib.py")),
)


def stack_now() -> tuple[str, ...]:
    """Return the lines that this thread is at, the innermost last, as ``"file.py:12 function"``."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(found) < _MOST:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            found.append(f"{_line(frame)} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


@disable_dynamo
def place_now() -> str:
    """Return the innermost of these lines, as ``"file.py:12"``, and, where a rule for a module is followed, that."""
    frame: FrameType | None = sys._getframe()
    rule = ""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        if frame.f_code.co_filename.endswith(_RULED_FORWARD):
            rule = BY_MODULE_RULE
        frame = frame.f_back
    return "" if frame is None else _line(frame) + rule


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the folder has gone
        here = ""
    line = f"{file.removeprefix(here)}:{frame.f_lineno}"
    return line.encode("utf-8", "backslashreplace").decode("utf-8")  # the name of a file need not be text
