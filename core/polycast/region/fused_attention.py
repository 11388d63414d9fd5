"""Disable the fused path of torch's attention modules in regions whose recipe computes linears.

In eval mode, nn.MultiheadAttention and nn.TransformerEncoder call one fused op. On cuda, torch disables it under
autocast; on other devices it does not. The recipe "fastest" computes the fused op itself; no other recipe does. torch
computes nested tensors only by the fused op, so for these it stays enabled.
"""

import sys

import torch

from ..engine.kernels import installed
from ..torch_internals.patcher import Patch, expect
from ..torch_internals.private_names import constant_to_dynamo
from .unfused import recipe_for

_LINEAR, _FUSED = "aten::linear", "aten::_native_multi_head_attention"


@constant_to_dynamo  # compiled code is guarded on the override
def _recipe_computes_linears() -> bool:
    """Return whether this thread is in an enabled region whose recipe computes linears, and not the fused op."""
    return any(
        recipe_for(_LINEAR, device_type) is not None and recipe_for(_FUSED, device_type) is None
        for device_type in tuple(installed)
    )


@constant_to_dynamo
def _is_for_nested_tensors() -> bool:
    """Return whether the forward that asks for the fused path was given a nested tensor."""
    given = sys._getframe(2).f_locals.values()
    return any(isinstance(each, torch.Tensor) and each.is_nested for each in given)


def ask_for_recipe(patch: Patch) -> None:
    """Make torch's attention modules ask whether the region has a recipe."""
    from torch.backends import mha

    torchs = vars(mha)["get_fastpath_enabled"]
    expect(torchs() is mha._is_fastpath_enabled, "get_fastpath_enabled does not return _is_fastpath_enabled")

    # It does not call torch's: Dynamo has a rule for the function by this name, and so would have none for torch's.
    def get_fastpath_enabled() -> bool:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return mha._is_fastpath_enabled and (not _recipe_computes_linears() or _is_for_nested_tensors())
        return True

    patch.replace(mha, "get_fastpath_enabled", get_fastpath_enabled)
