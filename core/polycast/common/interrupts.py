"""Tell an exception of the caller's from one of the code that was called."""

import itertools
import traceback

CALLERS_ERRORS = (MemoryError, RecursionError, Warning)
"""What may be raised anywhere: memory or the stack ended, or a filter made an error of a warning."""


def is_interrupt(error: BaseException) -> bool:
    """Return whether the handler of a signal raised an exception: a function that got the frame it interrupted."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = [*frame.f_locals.values()]  # first the arguments
        values += [each for value in values if isinstance(value, tuple) for each in value]  # *args
        if any(isinstance(signal, int) and at is frame.f_back for signal, at in itertools.pairwise(values)):
            return True
    return False


def is_callers(error: BaseException) -> bool:
    """Return whether the caller caused an exception, which says nothing of the code that was called."""
    return isinstance(error, CALLERS_ERRORS) or is_interrupt(error)


def raise_if_callers(error: BaseException) -> None:
    """Raise an exception again if the caller caused it."""
    if is_callers(error):
        raise error
