"""Tell exceptions that the caller caused from those of the code that it called."""

import itertools
import traceback

CALLERS_ERRORS = (MemoryError, RecursionError, Warning)
"""What any code may raise: it is out of memory or stack, or a filter turned a warning into an error."""


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised an exception: its traceback has a function that was given a signal and
    the frame of its caller, as handlers are.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = [*frame.f_locals.values()]  # first the arguments
        values += [each for value in values if isinstance(value, tuple) for each in value]  # *args
        if any(isinstance(signal, int) and at is frame.f_back for signal, at in itertools.pairwise(values)):
            return True
    return False


def is_callers(error: BaseException) -> bool:
    """Return whether the caller caused an exception, which then says nothing about the code that was called."""
    return isinstance(error, CALLERS_ERRORS) or is_interrupt(error)


def raise_if_callers(error: BaseException) -> None:
    """Raise an exception again if the caller caused it."""
    if is_callers(error):
        raise error
