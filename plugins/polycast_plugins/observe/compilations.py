"""Notify the observer when a compiler runs on a thread, so that the compiler's own ops are not counted."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from polycast.common.listeners import Listeners
from polycast.plugin import Change, Feature, Patch

from .observer_library import load_observer


def _notify_of_compilations(patch: Patch) -> None:
    """Wrap the callbacks that Dynamo calls before and after it compiles."""
    from torch._dynamo.callback import CompilationCallbackHandler

    handler = CompilationCallbackHandler
    patch.replace(handler, "install_callbacks", _notifying(handler.install_callbacks))


def _notifying(install_callbacks: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    @contextmanager
    def notifying(*args: Any, **kwargs: Any) -> Iterator[None]:
        observer = load_observer()
        observer.note_uncounted(True)
        try:
            with install_callbacks(*args, **kwargs):
                yield
        finally:
            observer.note_uncounted(False)

    return notifying


_COMPILATIONS = Feature(
    "compilations",
    "polycast.observe also counts ops that the compiler runs.",
    (
        Change(
            "torch._dynamo.callback",
            ("torch._dynamo.callback.CompilationCallbackHandler.install_callbacks",),
            _notify_of_compilations,
        ),
    ),
    outlives_uninstall=True,
)
observations: Listeners[object] = Listeners(_COMPILATIONS.make, _COMPILATIONS.undo)
"""All observations. While there are any, Dynamo notifies the observer."""
