"""Take the unfused path of torch's attention modules in regions whose recipe computes their linears.

In eval mode nn.MultiheadAttention and nn.TransformerEncoder call one fused op for all that they do, so that no kernel
of a recipe is asked. On cuda they do not under autocast; on other devices torch does not look.
"""

import torch

from ..compilers.on_import import Changes, expect
from ..engine import state
from ..engine.installation import also_put_in_place, installed, taken_back
from ..errors import warn_user

_LINEAR = "aten::linear"


def _recipe_computes_linears() -> bool:
    """Return whether this thread is in an enabled region whose recipe is for linears."""
    return any(
        (region := state.machine.innermost(device_type)) is not None
        and region[0] is not None
        and _LINEAR in region[0].low_bit
        and torch.is_autocast_enabled(device_type)
        for device_type in tuple(installed)
    )


# Dynamo calls it while it traces, and takes the answer for a constant: compiled code is guarded on the recipe in force.
setattr(_recipe_computes_linears, "_dynamo_marked_constant", True)


def _change(changes: Changes) -> None:
    from torch.backends import mha

    torchs = vars(mha)["get_fastpath_enabled"]
    expect(torchs() in (True, False), "get_fastpath_enabled returns no bool")

    def get_fastpath_enabled() -> bool:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return torchs() and not _recipe_computes_linears()
        return True

    changes.replace(mha, "get_fastpath_enabled", get_fastpath_enabled)


def _refused(reason: str) -> None:
    warn_user(
        "polycast cannot keep nn.MultiheadAttention and nn.TransformerEncoder from their fused path in this torch "
        f"({torch.__version__}: {reason}). In eval mode no recipe is asked for them."
    )


_changes = Changes({"torch.backends.mha": _change}, _refused)
also_put_in_place.append(_changes.make)
taken_back.append(_changes.take_back)
