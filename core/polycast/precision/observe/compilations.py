"""When a compiler is at work on a thread, told to the observer: its ops are not the program's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ...compilers.on_import import Changes
from ...engine.choice import choose
from ...errors import warn_user
from ...plugins.fork import hold_over_forks

_DYNAMO = "torch._dynamo.callback"
_lock = threading.RLock()
hold_over_forks(lambda: [_lock])
_observers = 0


def _change(changes: Changes) -> None:
    from torch._dynamo.callback import CompilationCallbackHandler

    handler = CompilationCallbackHandler
    changes.replace(handler, "install_callbacks", _telling(handler.install_callbacks))


def _telling(install_callbacks: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    @contextmanager
    def telling(*args: Any, **kwargs: Any) -> Iterator[None]:
        observer = choose().observer()
        observer.note_compiling(True)
        try:
            with install_callbacks(*args, **kwargs):
                yield
        finally:
            observer.note_compiling(False)

    return telling


def _refused(reason: str) -> None:
    warn_user(f"polycast.observe counts the ops that the compiler runs, too, where this torch compiles: {reason}")


_changes = Changes({_DYNAMO: _change}, _refused)


def tell_compilations() -> None:
    """Have compilations told to the observer, until :func:`tell_compilations_no_more`."""
    global _observers
    with _lock:
        _observers += 1
        _changes.make()


def tell_compilations_no_more() -> None:
    """Take that back, when all who asked have."""
    global _observers
    with _lock:
        _observers -= 1
        if _observers == 0:
            _changes.take_back()
