"""Run compiled functions eagerly where Dynamo cannot be given a guard on overrides.

This happens with a version of torch that polycast does not know. The compiler's stance becomes ``force_eager``, in the
whole process, with the first region that has an override or a cache, and until ``uninstall()``. Entering such a region
sets it again, so that the end of somebody else's stance does not lift it. A compiled function that is running when this
starts goes on as it was compiled, because torch lets nobody change the stance inside of it.
"""

import sys
from typing import Any

import torch

from ..engine.state import ready
from ..errors import warn_user
from ..torch_internals import changes

_EAGER = "force_eager"
_replaced: list[Any] = []
"""The stance that was set first, which knows the one before it; empty while none is set."""


def start(reason: str) -> None:
    """Run compiled functions eagerly from now on, and warn, with the reason."""
    if _replaced:
        return
    keep()
    # so that later entries with an override call prepare(), which calls keep()
    ready.intersection_update([key for key in ready if isinstance(key, str)])
    warn_user(
        f"polycast cannot make the compiler of this torch ({torch.__version__}) distinguish policies ({reason}). "
        + changes.GUARDS.lost
    )


def keep() -> None:
    """Set the stance, if somebody has set another one since."""
    if _stance() != _EAGER or not _replaced:
        ours = torch.compiler.set_stance(_EAGER)
        if not _replaced:
            _replaced.append(ours)


def stop() -> None:
    """Restore the stance that was set before, if one is set."""
    if not _replaced:
        return
    first = _replaced.pop()
    if _stance() == _EAGER:
        first.__exit__(None, None, None)


def _stance() -> str:
    """Return the stance of the compiler, which torch has no function for."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    stance: str = getattr(getattr(module, "_stance", None), "stance", "default")
    return stance
