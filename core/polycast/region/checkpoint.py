"""Make torch.utils.checkpoint recompute in the regions of the forward.

torch carries its own autocast state from the forward to the recomputation, but not overrides and caches. Both variants
of checkpoint keep the function to recompute in an attribute of an object that lives as long as the graph. A descriptor
in its place stores a snapshot with the function, and returns the function wrapped in those regions. The thread that
recomputes enters them, so nested checkpoints, inner regions, :func:`capture` and compiled code find what they found in
the forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine.inference import as_in_forward, in_function
from ..torch_internals.patcher import Patch, expect
from ..torch_internals.private_names import disable_dynamo, dynamo_disabled
from .capture import Snapshot, call_in, capture


@dataclass(frozen=True)
class _InRegions:
    """A function that runs in the regions of a snapshot, with a recipe only if its forward could."""

    function: Callable[..., Any]
    snapshot: Snapshot
    in_function: bool = False

    @dynamo_disabled  # as torch's checkpoint is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with as_in_forward(self.in_function):
            return call_in(self.snapshot, self.function, *args, **kwargs)


class _Recomputed:
    """The attribute in which a checkpoint keeps the function that its backward recomputes."""

    def __init__(self, name: str) -> None:
        self._name = name

    @disable_dynamo
    def __set__(self, checkpointed: Any, function: Callable[..., Any]) -> None:
        here = capture()
        more = _has_more_than_torch(here)
        vars(checkpointed)[self._name] = _InRegions(function, here, in_function()) if more else function

    @disable_dynamo
    def __get__(self, checkpointed: Any, owner: type | None = None) -> Any:
        if checkpointed is None:
            return self
        function = vars(checkpointed)[self._name]
        if isinstance(function, _InRegions) or not _has_more_than_torch(here := capture()):
            return function
        # The forward had no override and no cache, and this backward runs in a region that has.
        return _InRegions(
            function, Snapshot(tuple(region._replace(override=None, cache=None) for region in here.regions))
        )


def _has_more_than_torch(snapshot: Snapshot) -> bool:
    return bool(snapshot.switched_off) or any(region.has_more_than_torch for region in snapshot.regions)


def carry_in_checkpoints(patch: Patch) -> None:
    """Install the descriptors."""
    from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

    context: Any = vars(CheckpointFunction)["_backward_cls"]
    for method, name in (
        (CheckpointFunction.forward, "run_function"),
        (CheckpointFunction.backward, "run_function"),
        (_CheckpointFrame.__init__, "recompute_fn"),
    ):
        expect(name in method.__code__.co_names, f"{method.__qualname__} has no {name}")
    patch.replace(context, "run_function", _Recomputed("run_function"))
    patch.replace(_CheckpointFrame, "recompute_fn", _Recomputed("recompute_fn"))
