"""``polycast::cached_cast``: the cast of a weight in compiled code, looked up where the code runs.

Where a compiler traces a region, autocast's kernels are called with what stands for the weights, and what they do is
what the compiled code will do at each call. In a region with a cache they leave the cast of a weight to an operator. At
run time that gives what they would give for the weight there and then: the cast in the cache of the region that the
thread is in, or of the one in the compiled code; or a new one, where there is neither.

What it returns is the memory that is kept. To those who write what nobody else uses, its fake implementation says that
it lies in the weight's own storage. The compilers that have to be told more are told in compilers/cached_casts.py.
"""

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library

if TYPE_CHECKING:
    from .weight_cache import WeightCache

# What the device records would go on to use what it has recorded when the weight has another cast.
TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name))

_library = Library("polycast", "DEF")  # type: ignore[no-untyped-call]
_library.define("cached_cast(Tensor weight, ScalarType dtype, int cache=0) -> Tensor", tags=TAGS)  # type: ignore[no-untyped-call]


def _cast(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    """Return the cast on a device for which no kernels of polycast's are in place."""
    return weight.to(dtype)


def _fake(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    cast = torch.empty(0, dtype=dtype, device=weight.device)
    return cast.set_(weight.untyped_storage(), 0, weight.size(), weight.stride())


class _WithHistory(torch.autograd.Function):
    """The history that ``weight.to(dtype)`` has, on another tensor: to write it is to write what is kept."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype, cache: int) -> torch.Tensor:
        from ...torch_internals.dispatcher import (
            below_autograd,
        )  # `import polycast` imports this module, and little else

        ctx.dtype = weight.dtype
        if below_autograd is None:
            return weight.detach().to(dtype)
        with below_autograd():
            cast: torch.Tensor = torch.ops.polycast.cached_cast(weight, dtype, cache)
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None


def _with_history(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    cast: torch.Tensor = _WithHistory.apply(weight, dtype, cache)  # type: ignore[no-untyped-call]
    return cast


_library.impl("cached_cast", _cast, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("cached_cast", _fake, "Meta")  # type: ignore[no-untyped-call]
_library.impl("cached_cast", _with_history, "Autograd")  # type: ignore[no-untyped-call]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.caches: list[WeightCache] = []
        """Those of the regions in graphs that this thread is in."""


_thread = _Thread()


def enter_in_graph(cache: "WeightCache | None") -> None:
    """Note that a region in a graph is entered: what is traced in it will find its cache by the number."""
    if cache is not None:
        _thread.caches.append(cache)


def leave_in_graph(cache: "WeightCache | None") -> None:
    """Note that such a region is left."""
    if cache is not None:
        _thread.caches.remove(cache)


def number_in_graph(cache: "WeightCache | None") -> int:
    """Return the number by which a graph is to name the cache of the innermost region; 0: that of where it runs."""
    return cache.identity if cache is not None and any(each is cache for each in _thread.caches) else 0


def look_up_anew() -> None:
    """Clear the operator's dispatch cache: its kernels are others now."""
    from ...torch_internals.dispatcher import clear_dispatch_cache

    clear_dispatch_cache(torch.ops.polycast.cached_cast.default)
