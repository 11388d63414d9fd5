"""Detect writes to the casts of arguments in code that Dynamo traces.

To Dynamo, the version of a tensor is known only when the code runs. But it traces with fake tensors, whose versions
count the same writes.

Imported when Dynamo traces a module rule.
"""

import threading
from typing import Any, NoReturn

import torch

from ..engine.overlap import CONFLICT, RECORDED, UNWRITTEN, WRITTEN, overlap
from ..torch_internals.lookup import find
from ..torch_internals.private_names import version_of
from .dynamo import break_graph

_AT_CAST = "_polycast_at_cast"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _cannot_look(_: object) -> None:
    _break(f"Dynamo of this torch ({torch.__version__}) does not show what it traces.")


try:
    comptime: Any = find("torch._dynamo.comptime.comptime")  # calls a function with what Dynamo traces
except (AttributeError, ImportError):
    comptime = _cannot_look


class _Thread(threading.local):
    answer = 0


_thread = _Thread()


# The functions below read their arguments by name, from the frame that Dynamo traces: do not rename them.
def note_cast(argument: torch.Tensor, cast: torch.Tensor) -> None:
    """Note the versions of a cast and its argument."""
    comptime(_note_cast)


def how_written(argument: torch.Tensor, cast: torch.Tensor) -> int:
    """Return how a cast was written since it was noted."""
    comptime(_how_written)
    answer: int = _answer()
    return answer


def overlap_in_graph(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory, as far as that is known while tracing."""
    comptime(_overlap)
    answer: int = _answer()
    return answer == 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _answer() -> int:
    """Return the answer that was just found while tracing."""
    return _thread.answer


def _fake(ctx: Any, name: str) -> Any:
    return ctx.get_local(name).as_fake()


def _note_cast(ctx: Any) -> None:
    cast = _fake(ctx, "cast")
    setattr(cast, _AT_CAST, (cast._version, cast.grad_fn, version_of(_fake(ctx, "argument"))))


def _how_written(ctx: Any) -> None:
    cast = _fake(ctx, "cast")
    known = vars(cast).get(_AT_CAST)
    if known is None:
        _break("The argument was cast before a graph break: take the graph break out of the module.")
    version, history, argument_version = known
    if cast._version == version:
        _thread.answer = UNWRITTEN
    elif version_of(_fake(ctx, "argument")) != argument_version:
        _thread.answer = CONFLICT
    else:
        _thread.answer = WRITTEN if cast.grad_fn is history else RECORDED


def _overlap(ctx: Any) -> None:
    _thread.answer = int(overlap(_fake(ctx, "one"), _fake(ctx, "other")))


def _break(reason: str) -> NoReturn:
    break_graph(
        "an argument of a module with a rule",
        f"whether the module writes to an argument that the rule casts is not known. {reason}",
        "Give the module arguments in the dtype that its rule casts to.",
    )
