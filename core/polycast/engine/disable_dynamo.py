"""``torch.compiler.disable`` without its import of Dynamo.

After a graph break Dynamo compiles each function that is called, by itself. Entering a region sets state outside of any
graph: compiled by itself it would be refused, or do nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from ..torch_internals.names import skip_frames

_F = TypeVar("_F", bound=Callable[..., Any])


def disable_dynamo(func: _F) -> _F:
    """Have Dynamo skip the frames of `func` and of what it calls; where it traces a caller, it still inlines `func`."""
    skip_frames(func.__code__, below=True)
    return func


def may_switch_dynamo(func: _F) -> _F:
    """Have Dynamo skip the frame of `func` alone, so that it may switch Dynamo off for what comes after it too."""
    skip_frames(func.__code__, below=False)
    return func
