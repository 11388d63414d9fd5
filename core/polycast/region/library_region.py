"""`LibraryRegion`: the base class of regions that stand in for those of another library."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from typing_extensions import Self

from ..compilers.export import record_entry, record_exit
from ..engine import state
from ..torch_internals.private_names import disable_dynamo
from .autocast import autocast
from .decorate import decorate, in_block
from .entry import enter
from .suspend import Suspendable

_F = TypeVar("_F", bound=Callable[..., Any])


class LibraryRegion(autocast):
    """A region that stands in for one of another library, and is asked at each entry what to enter.

    torch.export records the region itself, not what it enters.

    Example:
        >>> import torch, polycast
        >>> from polycast.plugin import LibraryRegion
        >>> class InFloat16(LibraryRegion):
        ...     def entered(self):
        ...         return polycast.autocast(self.device, torch.float16)
        >>> with InFloat16("cpu"):
        ...     print(torch.get_autocast_dtype("cpu"))
        torch.float16
    """

    def entered(self) -> autocast:
        """Return the region whose settings to enter. Called at each entry, and when the body of a generator starts."""
        return self

    @disable_dynamo
    def __enter__(self) -> Self:
        in_function_mode = enter(self, self.entered()._settings)
        try:
            if in_function_mode:
                record_entry(self._settings)
        except BaseException:
            state.machine.leave(self)
            raise
        return self

    @disable_dynamo
    def leave(self) -> bool:
        """Leave the region, and return whether this thread was in it; where ``with`` raises an error, it was not."""
        in_function_mode = state.machine.leave(self)
        if in_function_mode:
            record_exit()
        return in_function_mode is not None

    def decorate(self, func: _F, block: AbstractContextManager[Any], before: Callable[[], object]) -> _F:
        """Return `func` wrapped so that its body runs in the region.

        Args:
            func: a function, generator function, coroutine function or asynchronous generator function.
            block: the context manager that calls of plain functions run in: an object that enters this region.
            before: called before the body of another function starts.
        """

        def suspendable() -> Suspendable:
            before()
            return self._suspendable()

        return decorate(func, in_block(block), suspendable)

    def _suspendable(self) -> Suspendable:
        return Suspendable(self.entered()._settings)
