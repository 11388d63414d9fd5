"""``torch.compiler.disable`` without its import of Dynamo.

After a graph break Dynamo compiles each function that is called, by itself. Entering a region sets state outside of any
graph: compiled by itself it would be refused, or do nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., Any])
_SKIP_ALL = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_SKIP_ONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def disable_dynamo(func: _F) -> _F:
    """Have Dynamo skip the frames of `func` and of what it calls; where it traces a caller, it still inlines `func`."""
    eval_frame.set_code_exec_strategy(func.__code__, _SKIP_ALL)
    return func


def may_switch_dynamo(func: _F) -> _F:
    """Have Dynamo skip the frame of `func` alone, so that it may switch Dynamo off for what comes after it too."""
    eval_frame.set_code_exec_strategy(func.__code__, _SKIP_ONE)
    return func
