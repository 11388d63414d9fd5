"""Announce slow work on stderr."""

import contextlib
import sys


def announce(text: str) -> None:
    """Print a line on stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a daemon's stderr may be closed, or None
        sys.stderr.write(f"polycast: {text}\n")
        sys.stderr.flush()
