"""What is done to the cast of an argument, in code that Dynamo traces.

Dynamo makes the version of a tensor a number that is known when the code runs only. What it runs the ops on while it
traces, though, are fake tensors, and their versions count the same writes.

Imported by Dynamo alone.
"""

import threading
from typing import Any

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.exc import unimplemented

from ..engine.overlap import overlap

_AT_CAST = "_polycast_at_cast"


class _Thread(threading.local):
    answer = 0


_thread = _Thread()


def note_cast(argument: torch.Tensor, cast: torch.Tensor) -> None:
    """Note what a cast and its argument are now."""
    comptime(_note_cast)


def how_written(argument: torch.Tensor, cast: torch.Tensor) -> int:
    """Return what has been done to a cast since it was noted, as a number of ``region/cast_arguments.py``."""
    comptime(_how_written)
    answer: int = _answer()
    return answer


def overlap_in_graph(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have memory in common, as far as that is known of them in the code."""
    comptime(_overlap)
    answer: int = _answer()
    return answer == 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _answer() -> int:
    """Return what was just found while tracing."""
    return _thread.answer


def _fake(ctx: Any, name: str) -> Any:
    return ctx.get_local(name).as_fake()


def _note_cast(ctx: Any) -> None:
    cast = _fake(ctx, "cast")
    setattr(cast, _AT_CAST, (cast._version, cast.grad_fn, _version(_fake(ctx, "argument"))))


def _how_written(ctx: Any) -> None:
    cast = _fake(ctx, "cast")
    known = vars(cast).get(_AT_CAST)
    if known is None:
        unimplemented(
            gb_type="an argument was cast before a graph break",
            context="",
            explanation="polycast: whether a module writes to an argument that a rule casts is not known.",
            hints=["Take the graph break out of the module that has the rule."],
        )
    version, history, argument_version = known
    if cast._version == version:
        _thread.answer = 0
    elif _version(_fake(ctx, "argument")) != argument_version:
        _thread.answer = 3
    else:
        _thread.answer = 1 if cast.grad_fn is history else 2


def _overlap(ctx: Any) -> None:
    _thread.answer = int(overlap(_fake(ctx, "one"), _fake(ctx, "other")))


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)
