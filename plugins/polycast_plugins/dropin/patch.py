"""patch_torch: make torch's autocast polycast's, in the whole process, until undone."""

import threading

from typing_extensions import Self

from polycast.plugin import hold_during_fork

from . import shim

_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_patches = 0


class patch_torch:
    """Run code that uses ``torch.autocast`` on polycast, unchanged: a context manager, or start and stop.

    While torch is patched, regions of ``torch.autocast``, its other names and its subclasses are polycast's in the
    whole process, and so are ``custom_fwd``, ``custom_bwd``, ``autocast_decorator`` and ``is_autocast_available``
    under their public names. Devices without a backend keep torch's behavior. Regions and subclasses of either library
    keep working when the patch begins or ends.

    Patches can be nested, on any threads: torch is restored when the last one ends.

    Example:
        >>> import polycast, torch
        >>> with polycast.patch_torch():
        ...     print(isinstance(torch.autocast("cpu"), polycast.autocast))
        True
        >>> isinstance(torch.autocast("cpu"), polycast.autocast)
        False
    """

    def __init__(self) -> None:
        self._started = 0

    def start(self) -> None:
        """Patch torch, until :meth:`stop`.

        Raises:
            ValueError: a ``POLYCAST_`` variable has an invalid value; nothing changes.
        """
        global _patches
        with _lock:
            if _patches == 0:
                shim.PATCH_TORCH.make()
                shim.EXIT.make()
            _patches += 1
            self._started += 1

    def stop(self) -> None:
        """Undo what :meth:`start` did.

        Raises:
            RuntimeError: it is not started, or stopped as often as started.
        """
        global _patches
        with _lock:
            if self._started == 0:
                raise RuntimeError(
                    "patch_torch: stop() without start(): this object does not patch torch now. Call stop() on the "
                    "object that start() was called on, once for each start()."
                )
            self._started -= 1
            _patches -= 1
            if _patches == 0:
                shim.PATCH_TORCH.undo()
                shim.restore_exit()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        started = "started" if self._started else "not started"
        return f"<patch_torch: {started}; torch is {'patched' if _patches else 'not patched'}>"
