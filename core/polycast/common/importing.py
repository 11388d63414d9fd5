"""Import code of plugins without deadlocks: Python locks each module while it is imported."""

import sys
from types import FrameType
from typing import Any

from . import atfork


def acquire(lock: Any) -> bool:
    """Acquire an RLock that is held during an import, and return whether it was acquired.

    A thread that is importing a module waits for a limited time, since the other import may need that module.
    """
    return bool(lock.acquire(timeout=atfork.LONGEST_WAIT if _is_in_import() else -1))


def _is_in_import() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
