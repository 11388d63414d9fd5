"""patch_torch: make torch's autocast polycast's, in the whole process, until it is undone."""

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from typing_extensions import Self

from ..common.atfork import hold_during_fork
from ..compilers.torch_autocast import TorchAutocast
from ..torch_internals import changes
from ..torch_internals.patcher import Patch
from . import stand_in, torch_classes

_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_patches = 0


class patch_torch:
    """Run code that uses ``torch.autocast`` on polycast, without a change to it: a context manager, or start and stop.

    While it is in force, in the whole process, regions that are made with ``torch.autocast``, by whatever name, are
    polycast's, and so are those of its subclasses that are made meanwhile. Every public name of ``custom_fwd``,
    ``custom_bwd``, ``autocast_decorator`` and ``is_autocast_available`` means polycast's. Then all are torch's own
    again. For a device that no backend serves they do what torch does.

    Regions and subclasses of either library keep working in force and out of it.

    It can be entered any number of times, on any thread: torch has its own back when the last is left.

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
            ValueError: a ``POLYCAST_`` variable has a value that is not legal; nothing changes.
        """
        global _patches
        with _lock:
            if _patches == 0:
                changes.make(changes.PATCH_TORCH)
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
                changes.undo(changes.PATCH_TORCH)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def stand_in_for_torch(patch: Patch) -> None:
    """Put in place what stands in for torch's classes and functions."""
    for owner, name, ours in _replacements():
        patch.replace(owner, name, ours)


def _replacements() -> list[tuple[Any, str, Any]]:
    """Return the attributes to be replaced: whose they are, their names, and what stands in."""
    modules = [
        (name, module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and name.partition(".")[0] == "torch"
        and not any(part.startswith("_") for part in name.split("."))
    ]
    classes = [TorchAutocast, *_classes_of_one_device(modules)]
    by_identity = {id(theirs): ours for theirs, ours in stand_in.FUNCTIONS.items()}
    attributes: list[tuple[Any, str, Any]] = [
        (theirs, name, ours) for theirs in classes for name, ours in torch_classes.attributes(theirs).items()
    ]
    attributes += [
        (module, attribute, by_identity[id(value)])
        for _, module in modules
        for attribute, value in list(vars(module).items())
        if id(value) in by_identity and not attribute.startswith("_")
    ]
    return attributes


def _classes_of_one_device(modules: list[tuple[str, ModuleType]]) -> Iterator[type]:
    """Return the deprecated classes that are torch.autocast for one device, such as torch.cpu.amp.autocast."""
    for name, module in modules:
        parts = name.split(".")
        if len(parts) == 4 and parts[2:] == ["amp", "autocast_mode"]:
            theirs = vars(module).get("autocast")
            if isinstance(theirs, type) and issubclass(theirs, TorchAutocast):
                yield theirs
