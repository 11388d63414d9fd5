"""patch_torch: have the names of torch's autocast mean polycast's, in the whole process, and take it back."""

import sys
import threading
from types import ModuleType
from typing import Any

from typing_extensions import Self

from ..plugins.fork import hold_over_forks
from . import stand_in

_lock = threading.RLock()
hold_over_forks(lambda: [_lock])
_patches = 0
_replaced: list[tuple[ModuleType, str, Any]] = []
"""What was there before, in the order of replacing."""


class patch_torch:
    """Run code that uses ``torch.autocast`` on polycast, without a change to it: a context manager, or start and stop.

    While it is in force, ``torch.autocast`` and every other public name of it, of ``custom_fwd``, ``custom_bwd``,
    ``autocast_decorator`` and ``is_autocast_available`` mean polycast's, in the whole process; then they are torch's
    own again. For a device that no backend serves they do what torch does.

    A name that was imported before (``from torch import autocast``) keeps what it meant then: torch's class.
    Regions and classes of either library keep working in force and out of it.

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
            ValueError: a POLYCAST_ variable has a value that is not legal; nothing changes.
        """
        global _patches
        with _lock:
            if _patches == 0:
                _replace(_replacements())
            _patches += 1
            self._started += 1

    def stop(self) -> None:
        """Take back what :meth:`start` did.

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
                _restore()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _replacements() -> list[tuple[ModuleType, str, Any]]:
    """Return, for every public name of what torch has, the module that has it, the name, and what stands in."""
    modules = [
        (name, module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and name.partition(".")[0] == "torch"
        and not any(part.startswith("_") for part in name.split("."))
    ]
    stand_ins: dict[Any, Any] = {stand_in.StandIn.stands_for: stand_in.StandIn, **stand_in.FUNCTIONS}
    for name, module in modules:
        # torch.<device>.amp.autocast_mode
        parts = name.split(".")
        if len(parts) == 4 and parts[2:] == ["amp", "autocast_mode"]:
            theirs = vars(module)["autocast"]
            stand_ins[theirs] = stand_in.of_one_device(theirs, parts[1])
    by_identity = {id(theirs): ours for theirs, ours in stand_ins.items()}
    return [
        (module, attribute, by_identity[id(value)])
        for _, module in modules
        for attribute, value in list(vars(module).items())
        if id(value) in by_identity and not attribute.startswith("_")
    ]


def _replace(replacements: list[tuple[ModuleType, str, Any]]) -> None:
    try:
        for module, name, ours in replacements:
            theirs = vars(module)[name]
            setattr(module, name, ours)
            _replaced.append((module, name, theirs))
        _show_torch_compile()
    except BaseException:
        _restore()
        raise


def _restore() -> None:
    _show_torch_compile()
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)


def _show_torch_compile() -> None:
    """Have torch.compile know the classes of both libraries: it keeps those that it saw when it was imported."""
    known = getattr(sys.modules.get("torch._dynamo.variables.torch"), "supported_ctx_manager_classes", None)
    if known is not None:
        for module, name, theirs in _replaced:
            if isinstance(theirs, type):
                known.update(dict.fromkeys([theirs, vars(module)[name]]))
