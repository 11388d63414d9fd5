"""Capture a thread's regions, to enter them on another thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ..engine import state
from ..engine.snapshot import snapshot
from ..engine.state import Settings
from ..torch_internals.dispatcher import is_any_autocast_enabled
from . import switched_off
from .suspend import Regions, Suspendable, decorate

_F = TypeVar("_F", bound=Callable[..., Any])
_Regions = TypeVar("_Regions", bound=Regions)


@dataclass(frozen=True)
class Snapshot:
    """The regions that :func:`capture` found. It holds settings only; apply it any number of times, on any thread."""

    regions: tuple[Settings, ...]
    switched_off: frozenset[str] = frozenset()
    """The devices that a module rule has switched autocast off for."""

    def apply(self) -> Regions:
        """Return a context manager, for one block at a time, that enters the regions on the current thread.

        It decorates plain functions too, as those of contextlib do; :meth:`wrap` also takes generators.
        Autocast is disabled inside for devices that had no region when the snapshot was taken.

        Example:
            >>> import threading, polycast
            >>> with polycast.autocast("cpu"):
            ...     snapshot = polycast.capture()
            >>> def work():
            ...     with snapshot.apply():
            ...         print(polycast.is_autocast_enabled("cpu"))
            >>> thread = threading.Thread(target=work)
            >>> thread.start(); thread.join()
            True
        """
        return self._entering(Regions)

    def wrap(self, func: _F) -> _F:
        """Return `func` wrapped so that its body runs in the regions; see :class:`autocast` for generators.

        Raises:
            TypeError: `func` is not callable.
        """
        if not callable(func):
            raise TypeError(
                f"wrap(func) requires a callable, but got {type(func).__name__}: pass the function, do not call it"
            )
        return decorate(func, self._wrap_plain, lambda: self._entering(Suspendable))

    def _wrap_plain(self, func: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return call_in(self, func, *args, **kwargs)

        return call

    def _entering(self, kind: type[_Regions]) -> _Regions:
        return kind(*self.regions, around=self._disabled_here, off_by_rule=self.switched_off)

    def _disabled_here(self) -> Iterator[Settings]:
        """Yield a disabled region for each device that has a region on this thread, and none in the snapshot."""
        if state.machine.last() is None and not is_any_autocast_enabled():
            return
        captured = {settings.device_type for settings in self.regions}
        for other in snapshot():
            if other.device_type not in captured:
                yield Settings(other.device_type, False, other.dtype, absolute=True)


def call_in(snapshot: Snapshot, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in the regions of a snapshot."""
    return snapshot._entering(Regions).call(function, *args, **kwargs)


def capture() -> Snapshot:
    """Return a snapshot of this thread's autocast state: for each device in a region, its dtype, policy and cache.

    Autocast state belongs to a thread. Give a snapshot to code that starts threads (a data-parallel loop, an
    executor), and enter it there with ``snapshot.apply()`` or ``snapshot.wrap(function)``.
    """
    return Snapshot(snapshot(), switched_off.devices())
