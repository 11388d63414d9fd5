"""When a compiler is at work on a thread, told to the observer: its ops are not the program's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..common.atfork import hold_during_fork
from ..engine.choice import choose
from ..torch_internals import changes
from ..torch_internals.patcher import Patch

_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_observers = 0


def tell_when_compiling(patch: Patch) -> None:
    """Have Dynamo tell the observer when it begins and ends."""
    from torch._dynamo.callback import CompilationCallbackHandler

    handler = CompilationCallbackHandler
    patch.replace(handler, "install_callbacks", _telling(handler.install_callbacks))


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


def tell_compilations() -> None:
    """Have compilations told to the observer, until :func:`tell_compilations_no_more`."""
    global _observers
    with _lock:
        _observers += 1
        changes.make(changes.COMPILATIONS)


def tell_compilations_no_more() -> None:
    """Take that back, when all who asked have."""
    global _observers
    with _lock:
        _observers -= 1
        if _observers == 0:
            changes.undo(changes.COMPILATIONS)
