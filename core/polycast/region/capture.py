"""Take a thread's regions to another thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..engine.snapshot import snapshot
from ..engine.state import Settings
from . import switched_off
from .decorate import decorate
from .suspend import Suspendable

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Snapshot:
    """What :func:`capture` saw. It holds settings only, and can be applied any number of times, on any thread."""

    regions: tuple[Settings, ...]
    switched_off: frozenset[str] = frozenset()
    """The devices that autocast is off for because of a rule for a module."""

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Return a context manager that enters the regions on the thread of now, and leaves them.

        Devices that were not in a region when the snapshot was taken are disabled inside.

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
        with self._here():
            yield

    def wrap(self, func: _F) -> _F:
        """Return `func` wrapped so that its body runs in the regions; generators and coroutines as in `autocast`.

        Raises:
            TypeError: `func` is not callable.
        """
        if not callable(func):
            raise TypeError(
                f"wrap(func) requires a callable, but got {type(func).__name__}: leave it to be called later"
            )
        return decorate(func, self.apply, self._here)

    def _here(self) -> Suspendable:
        captured = {settings.device_type for settings in self.regions}
        others = (
            Settings(other.device_type, False, other.dtype, absolute=True)
            for other in snapshot()
            if other.device_type not in captured
        )
        return Suspendable(*self.regions, *others, off_by_rule=self.switched_off)


def capture() -> Snapshot:
    """Return a snapshot of this thread's autocast state: for each device in a region its dtype, policy and cache.

    Autocast state belongs to a thread. Give a snapshot to code that starts threads (a data-parallel loop, an
    executor), and enter it there with ``snapshot.apply()`` or ``snapshot.wrap(function)``.
    """
    return Snapshot(snapshot(), switched_off.devices())
