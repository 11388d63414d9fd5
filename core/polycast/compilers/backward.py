"""The backward of compiled code, where policies or rules for modules decide what its forward computes in.

An uncompiled backward runs outside of regions, as a rule. That of compiled code AOTAutograd traces in the autocast
state that the function was called in, save where it is configured otherwise. With the tables that makes little
difference: a product has inputs of the fast dtype, and so has its backward. But what is kept in float32 would have its
gradients computed in the fast dtype, in which they are rounded, and may overflow. So there it is configured to have
autocast off.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..engine.snapshot import overrides_text
from ..torch_internals.names import tracing_context
from ..torch_internals.patcher import Patch

_MARK = "polycast_policies"
"""The attribute of the context of what is being compiled that says that there are policies or rules in it."""


def mark() -> None:
    """Note that there are policies or rules in what is being compiled."""
    context = tracing_context()
    if context is not None:
        setattr(context, _MARK, True)


def is_marked() -> bool:
    """Say whether there are policies or rules in what is being compiled."""
    return getattr(tracing_context(), _MARK, False)


@contextmanager
def outside_of_regions() -> Iterator[None]:
    """Return a context manager in which backwards are traced with autocast off, if there are policies or rules."""
    from torch._functorch import config

    if config.backward_pass_autocast != "same_as_forward" or not (overrides_text() or is_marked()):
        yield
    else:
        with config.patch(backward_pass_autocast="off"):
            yield


def wrap_joint(patch: Patch) -> None:
    """Have AOTAutograd trace joint graphs :func:`outside_of_regions`."""
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_capture

    create_joint: Any = vars(graph_capture)["create_joint"]
    with config.patch(backward_pass_autocast="off"):
        pass  # where there is no such thing, this raises

    @functools.wraps(create_joint)
    def create_joint_outside_of_regions(*args: Any, **kwargs: Any) -> Any:
        joint = create_joint(*args, **kwargs)

        @functools.wraps(joint)
        def joint_outside_of_regions(*args: Any, **kwargs: Any) -> Any:
            with outside_of_regions():
                return joint(*args, **kwargs)

        return joint_outside_of_regions

    patch.replace(graph_capture, "create_joint", create_joint_outside_of_regions)
