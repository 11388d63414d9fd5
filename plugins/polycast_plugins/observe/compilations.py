"""Tell observations when a compiler runs on a thread, so that they do not count the compiler's own ops."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from polycast.plugin import Change, Event, Feature, Patch


def _notify_of_compilations(patch: Patch) -> None:
    """Wrap the callbacks that Dynamo calls before and after it compiles."""
    from torch._dynamo.callback import CompilationCallbackHandler

    handler = CompilationCallbackHandler
    patch.replace(handler, "install_callbacks", _notifying(handler.install_callbacks))


def _notifying(install_callbacks: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    @contextmanager
    def notifying(*args: Any, **kwargs: Any) -> Iterator[None]:
        with compiling.during(), install_callbacks(*args, **kwargs):
            yield

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
compiling: Event[Callable[[bool], object]] = Event(_COMPILATIONS.make, _COMPILATIONS.undo)
"""True when a compiler begins to run on a thread, on that thread, and False when it ends."""
