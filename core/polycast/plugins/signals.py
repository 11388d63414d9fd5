"""Telling what a signal handler raised from what the code that it interrupted raised.

What a plugin raises when it is asked something is an answer: the device cannot be used. What a signal's handler raises
meanwhile, such as the user's timeout or the exit that SIGTERM asks for, comes out of the plugin's frames too, and is
none: it is the user's, and has to arrive.
"""

import functools
import inspect
import itertools
import signal
import traceback
from types import CodeType, FrameType


def raised_by_signal_handler(error: BaseException) -> bool:
    """Say whether an exception comes out of a signal handler, and not from code that caught it and raised another.

    Python runs a handler in a frame above the one that it interrupts, so the traceback leads through it. A frame is a
    handler's if its code is that of an installed handler, or if it was called as handlers are, with a signal's number
    and the frame below it. Either alone is not enough: a handler may uninstall itself, and may drop its arguments.
    """
    installed = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code in installed or _was_called_as_handler(frame) for frame in frames)


def _code(handler: object) -> CodeType | None:
    """Return the code of the frame that calling a handler makes, if it makes one."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    if not hasattr(handler, "__code__"):  # neither a function nor a method, so an object that can be called
        handler = type(handler).__call__
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _was_called_as_handler(frame: FrameType) -> bool:
    code, values = frame.f_code, frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        arguments += rest if isinstance(rest, tuple) else ()
    return any(
        isinstance(number, int) and number in signal.valid_signals() and below is frame.f_back is not None
        for number, below in itertools.pairwise(arguments)
    )
