"""Keeping compiled code away from regions with policies, where Dynamo is not the one that can be given a guard.

What is called in such a region then runs uncompiled: functions that are compiled, for on a thread with policies the
compiler's stance is an eager one, and, where a compiled function enters the region, the rest of that call.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..engine.disable_dynamo import may_switch_dynamo
from ..engine.in_force import policies_in_force
from ..engine.installation import taken_back
from ..errors import warn_user
from ..torch_internals import changes
from ..torch_internals.names import set_eval_frame

_T = TypeVar("_T", bound=type)
_EAGER = "force_eager"

_entering: list[Any] = []
_before: list[tuple[Any, Callable[..., Any]]] = []
"""The classes that enter regions and what they did it by before, while compiled code is kept away from policies."""


def enters_regions(cls: _T) -> _T:
    """Decorate a class whose instances enter regions, as context managers."""
    _entering.append(cls)
    return cls


def set_enter(cls: type[Any], enter: Callable[[Any], Any]) -> None:
    """Have a class that enters regions enter them by another method."""
    for place, (kept_away, _) in enumerate(_before):
        if kept_away is cls:
            _before[place] = cls, enter
            enter = _switching_dynamo_off(enter)
    cls.__enter__ = enter


def start(reason: str) -> None:
    """Keep compiled code away from policies from now on, and say why."""
    if _before:
        return
    for cls in _entering:
        _before.append((cls, cls.__enter__))
        cls.__enter__ = _switching_dynamo_off(cls.__enter__)
    keep()
    warn_user(
        f"polycast cannot have the compiler of this torch ({torch.__version__}) tell policies apart ({reason}). "
        + changes.FEATURES[changes.GUARDS].lost
    )


def in_effect() -> bool:
    """Say whether compiled code is kept away from policies."""
    return bool(_before)


def keep() -> None:
    """Set the compiler's stance to what it has to be, if somebody else has set it since."""
    if _before and not isinstance(stance := _stance(), _EagerUnderPolicies):
        torch.compiler.set_stance(_EagerUnderPolicies(stance))


def stop() -> None:
    """Let functions run compiled under policies again."""
    if not _before:
        return
    while _before:
        cls, enter = _before.pop()
        cls.__enter__ = enter
    if isinstance(stance := _stance(), _EagerUnderPolicies):
        torch.compiler.set_stance(str(stance))


def _stance() -> str:
    """Return the stance of the compiler, which torch has no function for."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    stance: str = getattr(getattr(module, "_stance", None), "stance", "default")
    return stance


class _EagerUnderPolicies(str):
    """A stance of the compiler that is another one, to compile nothing, on threads with policies."""

    def __eq__(self, other: object) -> bool:
        return (_EAGER if policies_in_force() else str(self)) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_EAGER if policies_in_force() else str(self))


def _switching_dynamo_off(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what enters a region and, if that has policies, has the rest of a compiled call run uncompiled."""

    @functools.wraps(enter)
    def switching(self: Any) -> Any:
        callback = set_eval_frame(None)
        try:
            return enter(self)
        finally:
            if policies_in_force():
                keep()
            else:
                set_eval_frame(callback)

    return may_switch_dynamo(switching)


taken_back.append(stop)
