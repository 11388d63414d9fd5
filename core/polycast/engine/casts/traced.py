"""Leave the casts of weights in traced code to ``polycast::cached_cast``, in a region with a cache.

What is exported keeps torch's ops. So does code in other regions: a compiler fuses casts that nothing uses later, and
has one memory for all of them.
"""

import torch

from ...registry.registry import registry
from ...torch_internals import changes
from ...torch_internals.private_names import behind_functional_tensor, replayed_view, tracing_context
from .. import state
from .cached_cast import number_in_graph
from .weights import covers, is_dense, parameter_of

MIN_ELEMENTS = 1024
"""Of a weight that is worth an operator: a compiler fuses the cast of a smaller one into what uses it."""


def can_leave_casts() -> bool:
    """Return whether what is being compiled may leave casts to the operator."""
    refused = changes.CACHED_CASTS.is_refused() or not changes.overrides_are_guarded()
    return not refused and not torch.compiler.is_exporting()


def cast_of_traced(tensor: torch.Tensor, dtype: torch.dtype, device_type: str) -> torch.Tensor | None:
    """Return the cast of a traced weight as the operator; None: the cast is not left to it."""
    _, cache = state.machine.innermost(device_type)
    if cache is None or tracing_context() is None or not registry.find(device_type).caches_casts:
        return None
    changes.CACHE_KEYS.make()  # Dynamo calls the kernels before AOTAutograd does, and before the key is made
    changes.CACHED_CASTS.make()
    if not can_leave_casts():
        return None
    weight = parameter_of(tensor) if behind_functional_tensor(tensor) is not None else None
    if weight is None or weight.numel() < MIN_ELEMENTS or not is_dense(weight):
        return None
    # A cast of a part would be one of all of the weight, which may be far more than the code uses.
    if tensor is not weight and not covers(tensor, weight):
        return None
    cast: torch.Tensor = torch.ops.polycast.cached_cast(weight, dtype, number_in_graph(cache))
    if tensor is weight:
        return cast
    view = replayed_view(tensor, cast)
    # An in-place change of the view, such as t_(), is not replayed.
    return view if view is not None and view.shape == tensor.shape and view.stride() == tensor.stride() else None
