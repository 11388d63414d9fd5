"""``torch.compiler.disable`` without its import of Dynamo.

After a graph break, Dynamo compiles each function that is called by itself. Entering a region sets state outside of
any graph: compiled by itself, it would fail or do nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from ..torch_internals.private_names import skip_frames

_F = TypeVar("_F", bound=Callable[..., Any])


def disable_dynamo(func: _F) -> _F:
    """Make Dynamo skip the frames of `func` and its callees; when it traces a caller, it still inlines `func`."""
    skip_frames(func.__code__)
    return func
