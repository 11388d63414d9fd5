"""Saying so where a reentrant checkpoint recomputes under other policies than its forward ran under.

``torch.utils.checkpoint`` takes torch's autocast state from the forward to the recomputation, and policies are no part
of it. Without ``use_reentrant`` torch sees for itself that other dtypes come out, and raises; with it nobody does.
"""

import functools
import sys
import warnings
from typing import Any

import torch

from ..compilers.on_import import Changes
from ..engine.in_force import policies_in_force
from ..engine.installation import taken_back
from ..errors import warn_user

TAKES_POLICIES_ALONG = "_polycast_takes_policies_along"
"""The attribute of a function that runs under the same policies wherever it is called."""
_FORWARD = "polycast_forward"
"""The attribute of a checkpoint's ctx that says under which policies its forward ran, and where it was called."""

_said: dict[str | tuple[str, type[Warning], int], int] = {}  # the warnings given, as Python keeps them


def watch_checkpoints() -> None:
    """Have reentrant checkpoints watched; to be called in each region with policies."""
    _changes.make()


def _watch(changes: Changes) -> None:
    from torch.utils.checkpoint import CheckpointFunction

    forward, backward = (vars(CheckpointFunction)[name].__func__ for name in ("forward", "backward"))

    @functools.wraps(forward)
    def noting_forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        policies = policies_in_force()
        if policies:
            setattr(ctx, _FORWARD, (policies, _caller()))
        return forward(ctx, run_function, *args)

    @functools.wraps(backward)
    def comparing_backward(ctx: Any, *args: Any) -> Any:
        policies, caller = getattr(ctx, _FORWARD, ("", None))
        if policies != policies_in_force() and not _takes_policies_along(ctx.run_function):
            _say(ctx.run_function, caller or _caller())
        return backward(ctx, *args)

    changes.replace(CheckpointFunction, "forward", staticmethod(noting_forward))
    changes.replace(CheckpointFunction, "backward", staticmethod(comparing_backward))


def _takes_policies_along(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, TAKES_POLICIES_ALONG, False)


def _caller() -> tuple[str, int, str]:
    """Return file, line and module of the innermost code that is neither torch's nor ours, or of the outermost code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "polycast"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")


def _say(function: Any, caller: tuple[str, int, str]) -> None:
    name = getattr(function, "__name__", type(function).__name__)
    filename, line, module = caller
    message = (
        f"torch.utils.checkpoint(use_reentrant=True) recomputes {name} under other policies (policy= of "
        "polycast.autocast) than its forward ran under: dtypes and gradients may not be those of the forward. Take the "
        "policies along: checkpoint(polycast.capture().wrap(function), ..., use_reentrant=True)."
    )
    warnings.warn_explicit(message, UserWarning, filename, line, module, _said)


def _cannot_watch(reason: str) -> None:
    warn_user(
        f"polycast cannot see where torch.utils.checkpoint(use_reentrant=True) of this torch ({torch.__version__}) "
        f"loses policies ({reason}). In regions with policy=, call checkpoint(polycast.capture().wrap(function), ...)."
    )


_changes = Changes({"torch.utils.checkpoint": _watch}, _cannot_watch)
taken_back.append(_changes.take_back)
