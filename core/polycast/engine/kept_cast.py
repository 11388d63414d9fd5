"""``polycast::kept_cast``: the cast of a weight in compiled code, looked up where the code runs.

Where a compiler traces a region, autocast's kernels are called with what stands for the weights, and what they do is
what the compiled code will do at each call. In a region with a cache they leave the cast of a weight to an operator. At
run time that gives what they would give for the weight there and then: the cast in the cache of the region that the
thread is in, or of the one in the compiled code; or a new one, where there is neither.

What it returns is the memory that is kept. To those who write what nobody else uses, its fake implementation says that
it lies in the weight's own storage. The compilers that have to be told more are told in compilers/kept_casts.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

# What the device records would go on to use what it has recorded when the weight has another cast.
_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name)
)

_library = Library("polycast", "DEF")  # type: ignore[no-untyped-call]
_library.define("kept_cast(Tensor weight, ScalarType dtype, int cache=0) -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]


def _cast(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    """Return the cast on a device for which no kernels of polycast's are in place."""
    return weight.to(dtype)


def _fake(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    cast = torch.empty(0, dtype=dtype, device=weight.device)
    return cast.set_(weight.untyped_storage(), 0, weight.size(), weight.stride())


class _WithHistory(torch.autograd.Function):
    """Another tensor on the memory of the cast, a write of which is a write of both."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype, cache: int) -> torch.Tensor:
        ctx.dtype = weight.dtype
        with torch._C._AutoDispatchBelowAutograd():
            cast: torch.Tensor = torch.ops.polycast.kept_cast(weight, dtype, cache)
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None


def _cast_with_history(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    cast: torch.Tensor = _WithHistory.apply(weight, dtype, cache)  # type: ignore[no-untyped-call]
    return cast


_library.impl("kept_cast", _cast, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("kept_cast", _fake, "Meta")  # type: ignore[no-untyped-call]
# For all devices: torch reads no names of the keys that autograd has for maia and mtia. The native engine has its own.
_library.impl("kept_cast", _cast_with_history, "Autograd")  # type: ignore[no-untyped-call]


def look_up_again() -> None:
    """Have torch look the op's kernels up anew where it traces: it remembers them, and these come and go."""
    torch.ops.polycast.kept_cast.default._dispatch_cache.clear()


_CastOfTraced = Callable[[torch.Tensor, torch.dtype, str], torch.Tensor | None]
_cast_of_traced: _CastOfTraced = lambda tensor, dtype, device_type: None  # noqa: E731


def of_traced(tensor: torch.Tensor, dtype: torch.dtype, device_type: str) -> torch.Tensor | None:
    """Return the cast of what stands for a weight in what is compiled, as the operator; None: it is not for that."""
    return _cast_of_traced(tensor, dtype, device_type)


def decided_by(decide: _CastOfTraced) -> None:
    """Have it decided by what knows the compilers."""
    global _cast_of_traced
    _cast_of_traced = decide
