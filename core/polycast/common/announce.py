"""Announce slow work on stderr, and log what polycast finds and chooses."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

log = logging.getLogger("polycast")


def announce(text: str) -> None:
    """Print a line on stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a daemon's stderr may be closed, or None
        sys.stderr.write(f"polycast: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def announce_if_slow(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Print a line on stderr if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, announce, (text,))
    timer.daemon = True
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter exits
            timer.start()
            stack.callback(timer.join)  # Python warns if a process with several threads forks
            stack.callback(timer.cancel)
        yield
