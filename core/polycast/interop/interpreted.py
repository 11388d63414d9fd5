"""Functions that Dynamo leaves to the interpreter, where they are called below a graph break.

Dynamo compiles each function that is called between what it could not trace. Entering a region sets state outside of
any graph, and compiled by itself it would be refused, or do nothing. ``torch.compiler.disable`` says the same, but
imports all of Dynamo; this is what it comes to.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., Any])
_SKIP_ALL = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def interpreted(func: _F) -> _F:
    """Have neither `func` nor what it calls compiled by itself; what traces a caller of it still looks into it."""
    eval_frame.set_code_exec_strategy(func.__code__, _SKIP_ALL)
    return func
