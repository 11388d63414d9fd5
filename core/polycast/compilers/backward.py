"""Trace the backward of code compiled under policies or module rules with autocast off.

In eager mode, a backward usually runs outside of regions. AOTAutograd traces the backward of compiled code in the
autocast state of the function's call, unless configured otherwise. With the backends' tables that makes little
difference: a matmul has inputs of the fast dtype, and so does its backward. But ops that policies keep in float32 would
have their gradients computed in the fast dtype, which rounds them and may overflow.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..engine.snapshot import overrides_text
from ..torch_internals.patcher import Patch
from ..torch_internals.private_names import tracing_context

_MARK = "polycast_policies"
"""An attribute of the tracing context: the code being compiled depends on policies or module rules."""


def mark() -> None:
    """Note that the code being compiled depends on policies or module rules."""
    context = tracing_context()
    if context is not None:
        setattr(context, _MARK, True)


def is_marked() -> bool:
    """Return whether the code being compiled depends on policies or module rules."""
    return getattr(tracing_context(), _MARK, False)


@contextmanager
def backward_without_autocast() -> Iterator[None]:
    """Trace backwards with autocast off, if there are policies or module rules."""
    from torch._functorch import config

    if config.backward_pass_autocast != "same_as_forward" or not (overrides_text() or is_marked()):
        yield
    else:
        with config.patch(backward_pass_autocast="off"):
            yield


def wrap_joint(patch: Patch) -> None:
    """Make AOTAutograd trace joint graphs :func:`backward_without_autocast`."""
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_capture

    create_joint: Any = vars(graph_capture)["create_joint"]
    with config.patch(backward_pass_autocast="off"):
        pass  # raises if this torch has no such setting

    @functools.wraps(create_joint)
    def create_joint_without_autocast_in_backward(*args: Any, **kwargs: Any) -> Any:
        joint = create_joint(*args, **kwargs)

        @functools.wraps(joint)
        def joint_without_autocast_in_backward(*args: Any, **kwargs: Any) -> Any:
            with backward_without_autocast():
                return joint(*args, **kwargs)

        return joint_without_autocast_in_backward

    patch.replace(graph_capture, "create_joint", create_joint_without_autocast_in_backward)
