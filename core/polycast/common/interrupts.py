"""Tell exceptions that the caller caused from those of the code that it called."""

import functools
import signal
import traceback
from collections.abc import Callable
from types import CodeType, FrameType

PLUGIN_ERRORS = (Exception, SystemExit)  # some libraries exit if they find no device
CALLERS_ERRORS = (MemoryError, RecursionError, Warning)
"""Errors of any code: it is out of memory or stack, or a filter turned a warning into an error."""


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler that is installed now raised an exception, or one that it was raised from."""
    handlers = {_code(handler) for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)}
    chain, frames = [error], set[FrameType]()
    for each in chain:
        called = [frame for frame, _ in traceback.walk_tb(each.__traceback__)]
        if isinstance(each, KeyboardInterrupt) or any(frame.f_code in handlers for frame in called):
            return True
        frames.update(called)
        context = each.__context__
        # The context also has the error that our caller was handling when it called, which these frames did not catch.
        caught = context is not None and context.__traceback__ is not None and context.__traceback__.tb_frame in frames
        chain += [
            before
            for before in (each.__cause__, context if caught else None)
            if before is not None and not any(before is known for known in chain)
        ]
    return False


def _code(handler: Callable[..., object]) -> CodeType | None:
    """Return the code of a function, a method, a partial of one, or ``__call__``; None if it is not in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code: CodeType | None = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code


def is_callers(error: BaseException) -> bool:
    """Return whether the caller caused an exception, which then says nothing about the code that was called."""
    return isinstance(error, CALLERS_ERRORS) or is_interrupt(error)


def raise_if_callers(error: BaseException) -> None:
    """Raise an exception again if the caller caused it."""
    if is_callers(error):
        raise error


def raise_if_callers_at_import(error: BaseException) -> None:
    """Do the same for an import; a warning that a filter turns into an error is of the code that is imported."""
    if is_callers(error) and not isinstance(error, Warning):
        raise error
