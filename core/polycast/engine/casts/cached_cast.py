"""``polycast::cached_cast``: the cast of a weight in compiled code, looked up where the code runs.

While a compiler traces a region with a cache, autocast's kernels replace the cast of a weight by this operator. When
the compiled code runs, it returns the cast from the cache of the thread's region, or of the region in the compiled
code, or a new cast if there is neither.

In eager code, a `cache` of -1 stands for the casts of the thread's region, whether it has a WeightCache or not.

The result is cached memory, which must not be written. So the fake implementation returns a tensor on the weight's own
storage, which compilers do not reuse; see compilers/cached_casts.py for those that need more.
"""

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library

if TYPE_CHECKING:
    from .cast_cache import CastCache

# A recorded device graph would not see that a weight has a new cast.
TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name))

_library = Library("polycast", "DEF")  # type: ignore[no-untyped-call]
_library.define("cached_cast(Tensor weight, ScalarType dtype, int cache=0) -> Tensor", tags=TAGS)  # type: ignore[no-untyped-call]


def _cast(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    """Return a new cast, on a device without polycast's kernels."""
    return weight.to(dtype)


def _fake(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    cast = torch.empty(0, dtype=dtype, device=weight.device)
    return cast.set_(weight.untyped_storage(), 0, weight.size(), weight.stride())


class _WithHistory(torch.autograd.Function):
    @staticmethod
    def forward(weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        return cast.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


def with_history(weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of a cast, with the autograd history of casting the weight or view."""
    result: torch.Tensor = _WithHistory.apply(weight, cast)  # type: ignore[no-untyped-call]
    return result


def _cast_with_history(weight: torch.Tensor, dtype: torch.dtype, cache: int = 0) -> torch.Tensor:
    from ...torch_internals.dispatcher import below_autograd  # slow to import, and `import polycast` needs this module

    if below_autograd is None:
        return weight.to(dtype)
    with below_autograd():
        cast: torch.Tensor = torch.ops.polycast.cached_cast(weight, dtype, cache)
    return with_history(weight, cast)


_library.impl("cached_cast", _cast, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("cached_cast", _fake, "Meta")  # type: ignore[no-untyped-call]
_library.impl("cached_cast", _cast_with_history, "Autograd")  # type: ignore[no-untyped-call]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.in_graphs: list[Any] = []
        """The regions in graphs, of compiled code or while it is traced, that the thread is in."""


thread = _Thread()


def number_in_graph(cache: "CastCache | None") -> int:
    """Return the number by which compiled code names a region's cache; 0 for the cache where it runs."""
    is_in_graph = cache is not None and any(region._settings.cache is cache for region in thread.in_graphs)
    return cache.identity if cache is not None and is_in_graph else 0


def clear_operator_cache() -> None:
    """Clear the operator's dispatch cache, after its kernels have changed."""
    from ...torch_internals.dispatcher import clear_dispatch_cache

    clear_dispatch_cache(torch.ops.polycast.cached_cast.default)
