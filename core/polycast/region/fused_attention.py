"""Disable the fused path of torch's attention modules in regions whose recipe computes linears.

In eval mode, nn.MultiheadAttention and nn.TransformerEncoder call one fused op, which no kernel of a recipe covers. On
cuda, torch disables it under autocast; on other devices it does not. The recipe "fastest" keeps it where linears are
fast in the fast dtype, in which the fused op computes.
"""

import torch

from ..engine import state
from ..engine.installation import installed
from ..policy.dtypes import dtype_name
from ..policy.recipe import Fastest, Recipe
from ..profiling.device_profile import DeviceProfile
from ..torch_internals.patcher import Patch, expect

_LINEAR = "aten::linear"
_ROWS = 128
"""The rows of a typical call of attention modules."""


def _recipe_computes_linears() -> bool:
    """Return whether this thread is in an enabled region whose recipe computes linears otherwise than torch."""
    return any(
        (region := state.machine.innermost(device_type)) is not None
        and region[0] is not None
        and _LINEAR in region[0].low_bit
        and torch.is_autocast_enabled(device_type)
        and not _fused_is_fastest(region[0].recipe, device_type)
        for device_type in tuple(installed)
    )


def _fused_is_fastest(recipe: Recipe | None, device_type: str) -> bool:
    """Return whether a recipe leaves linears of many rows to torch's kernels for the fast dtype."""
    if not isinstance(recipe, Fastest) or not isinstance(recipe.profile, DeviceProfile):
        return False
    ratio = recipe.profile.ratio("linear", _ROWS, dtype_name(torch.get_autocast_dtype(device_type)))
    return ratio is None or ratio <= 1


# Dynamo calls it while it traces, and takes the answer for a constant: compiled code is guarded on the override.
setattr(_recipe_computes_linears, "_dynamo_marked_constant", True)


def ask_for_recipe(patch: Patch) -> None:
    """Make torch's attention modules ask whether the region has a recipe."""
    from torch.backends import mha

    torchs = vars(mha)["get_fastpath_enabled"]
    expect(torchs() in (True, False), "get_fastpath_enabled returns no bool")

    def get_fastpath_enabled() -> bool:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return torchs() and not _recipe_computes_linears()
        return True

    patch.replace(mha, "get_fastpath_enabled", get_fastpath_enabled)
