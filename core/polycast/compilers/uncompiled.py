"""Keeping compiled code away from regions with policies, where Dynamo is not the one that can be given a guard.

What is called in such a region then runs uncompiled: a function that is compiled, since the compiler's stance is eager on a
thread with policies; and, where the region is entered in the middle of a compiled function, the rest of that function.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

from ..engine.disable_dynamo import may_switch_dynamo
from ..engine.in_force import policies_in_force

_T = TypeVar("_T", bound=type)

_entering: list[Any] = []
_before: list[tuple[Any, Callable[..., Any]]] = []
"""The classes that enter regions, and what they did so by before; empty where compiled code is not kept away."""


def enters_regions(cls: _T) -> _T:
    """Decorate a class whose instances enter regions, as context managers."""
    _entering.append(cls)
    return cls


def start(reason: str) -> None:
    """Keep compiled code away from policies from now on, and say why."""
    if _before:
        return
    for cls in _entering:
        _before.append((cls, cls.__enter__))
        cls.__enter__ = _switching_dynamo_off(cls.__enter__)
    keep()
    warnings.warn(
        f"polycast cannot have the compiler of this torch ({torch.__version__}) tell policies apart ({reason}): functions "
        "that are called in a region with policy= run uncompiled, which is slower. Use a torch that polycast supports.",
        stacklevel=2,
    )


def keep() -> None:
    """Set the stance of the compiler to what it is to be, where somebody else has set it since."""
    stance = _stance()
    if _before and not isinstance(stance, _EagerUnderPolicies):
        torch.compiler.set_stance(_EagerUnderPolicies(stance))


def stop() -> None:
    """Let functions run compiled again."""
    while _before:
        cls, enter = _before.pop()
        cls.__enter__ = enter
    stance = _stance()
    if isinstance(stance, _EagerUnderPolicies):
        torch.compiler.set_stance(str(stance))


def _stance() -> str:
    """Return the stance of the compiler, which torch has no function for."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    stance: str = getattr(getattr(module, "_stance", None), "stance", "default")
    return stance


class _EagerUnderPolicies(str):
    """A stance of the compiler that is another one on threads where policies are in force: compile nothing."""

    def __eq__(self, other: object) -> bool:
        return (_EAGER if policies_in_force() else str(self)) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_EAGER if policies_in_force() else str(self))


_EAGER = "force_eager"


def _switching_dynamo_off(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what enters a region and, if it has policies, ends the compiled function in which it is entered."""

    @functools.wraps(enter)
    def switching(self: Any) -> Any:
        callback = eval_frame.set_eval_frame(None)
        try:
            return enter(self)
        finally:
            if not policies_in_force():
                eval_frame.set_eval_frame(callback)

    return may_switch_dynamo(switching)
