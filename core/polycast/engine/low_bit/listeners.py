"""Who is told of each op that a recipe computes, or would and does not."""

import threading
from collections.abc import Callable

from ...common.atfork import hold_during_fork
from ...policy.recipes import Recipe
from ...torch_internals.names import tracing_context

_Note = Callable[[str, str, str, str | None], object]
_listeners: tuple[tuple[_Note, int | None], ...] = ()
_lock = threading.RLock()
hold_during_fork(lambda: [_lock])


def listen(note: _Note, thread: int | None) -> None:
    """Have a function told of each op that is computed by a recipe, or is not: of one thread, or of all.

    It gets the device type, the recipe, the op, by its name in the dispatcher, and the reason if it is not.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, (note, thread))


def listen_no_more(note: _Note) -> None:
    """Have it told no more."""
    global _listeners
    with _lock:
        _listeners = tuple(each for each in _listeners if each[0] != note)


def tell(device_type: str, recipe: Recipe, op: str, reason: str | None) -> None:
    """Tell of an op; not while a compiler traces: code tells of itself as it runs."""
    if not _listeners or tracing_context() is not None:
        return
    thread = threading.get_ident()
    for note, of in _listeners:
        if of in (None, thread):
            note(device_type, recipe.short, op, reason)
