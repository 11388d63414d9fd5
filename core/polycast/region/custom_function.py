"""custom_fwd and custom_bwd: autocast in the forward and backward of a torch.autograd.Function.

``backward`` has to run in the autocast state of ``forward``, and the only thing that both see is ``ctx``. Where forward
takes no ctx (the style with ``setup_context``), setup_context is the first to see it. It runs right after forward, in
the same autocast state, but nobody decorates it: so the first call of a decorated forward finds the class that it
belongs to, and has the class's setup_context record the state too.
"""

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, overload

import torch
from torch.autograd.function import FunctionCtx, FunctionMeta

from ..compilers.guards import guard_regions
from ..engine import state
from ..engine.casting import cast_nested
from ..engine.state import Settings
from ..plugins.registry import registry
from .suspend import Suspendable
from .thread_state import get_autocast_dtype, is_autocast_enabled

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def custom_fwd(fwd: _F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> _F: ...
@overload
def custom_fwd(fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Callable[[_F], _F]: ...
def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate the ``forward`` of a torch.autograd.Function, in either style: ctx first, or with ``setup_context``.

    Args:
        fwd: the function; None to use this as a decorator with arguments.
        device_type: the device whose autocast state the function heeds.
        cast_inputs: None: ``forward`` runs in the autocast state that it is called in. A dtype: where autocast is
            enabled, eligible tensors among the inputs (also in containers) are cast to it, and ``forward`` runs with
            autocast disabled. Where autocast is disabled it has no effect.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.get_backend`.

    Example:
        >>> import torch, polycast
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @polycast.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(x):
        ...         return x * x
        ...     @staticmethod
        ...     def setup_context(ctx, inputs, output):
        ...         ctx.save_for_backward(*inputs)
        ...     @staticmethod
        ...     @polycast.custom_bwd(device_type="cpu")
        ...     def backward(ctx, grad):
        ...         return 2 * grad * ctx.saved_tensors[0]
        >>> with polycast.autocast("cpu"):
        ...     print(Square.apply(torch.ones(2, dtype=torch.bfloat16)).dtype)
        torch.float32
    """
    device_type = registry.find(device_type).device_type
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    def record(ctx: Any) -> None:
        # The names are those of torch.amp's decorators, so that either half may be torch's.
        ctx._dtype = get_autocast_dtype(device_type)
        ctx._fwd_used_autocast = cast_inputs is None and is_autocast_enabled(device_type)
        ctx._polycast_region = state.machine.innermost(device_type)

    @functools.wraps(fwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], FunctionCtx):
            record(args[0])
        else:
            _record_in_setup_context(decorated, record)
        if cast_inputs is None or not is_autocast_enabled(device_type):
            return fwd(*args, **kwargs)
        with Suspendable(Settings(device_type, False, get_autocast_dtype(device_type))):
            return fwd(
                *(cast_nested(value, device_type, cast_inputs) for value in args),
                **{name: cast_nested(value, device_type, cast_inputs) for name, value in kwargs.items()},
            )

    return decorated


@overload
def custom_bwd(bwd: _F, *, device_type: str) -> _F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[_F], _F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate the ``backward`` of a torch.autograd.Function: it runs in the autocast state of its ``forward``.

    Args:
        bwd: the function; None to use this as a decorator with arguments.
        device_type: the device whose autocast state the function heeds, as given to :func:`custom_fwd`.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.get_backend`; RuntimeError from the decorated function where
            ``forward`` is not decorated with :func:`custom_fwd`.
    """
    device_type = registry.find(device_type).device_type
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            overlay, cache = getattr(ctx, "_polycast_region", None) or (None, None)
            settings = Settings(device_type, ctx._fwd_used_autocast, ctx._dtype, None, overlay, cache, exact=True)
        except AttributeError:
            raise RuntimeError(
                f"{bwd.__qualname__} is decorated with custom_bwd, but its forward did not record its autocast state. "
                "Decorate forward with polycast.custom_fwd."
            ) from None
        with Suspendable(settings, *guard_regions(settings)):
            return bwd(ctx, *args, **kwargs)

    return decorated


def _record_in_setup_context(forward: Callable[..., Any], record: Callable[[Any], None]) -> None:
    """Have the setup_context of the class that `forward` is being called for call `record` too, from now on."""
    cls = _class_of(forward, sys._getframe(2))
    if cls is None or getattr(cls.setup_context, "_polycast_record", None) is record:
        return
    setup_context = cls.setup_context

    @functools.wraps(setup_context)
    def recording(ctx: Any, inputs: Any, output: Any) -> Any:
        record(ctx)
        return setup_context(ctx, inputs, output)

    setattr(recording, "_polycast_record", record)
    setattr(cls, "setup_context", staticmethod(recording))


def _class_of(forward: Callable[..., Any], frame: FrameType | None) -> Any:
    """Return the Function that is being applied: a caller's frame has it, that of ``apply`` in the simple case."""
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, FunctionMeta) and _is_wrapped_by(forward, getattr(value, "forward", None)):
                return value
        frame = frame.f_back
    return None


def _is_wrapped_by(func: Callable[..., Any], outer: Any) -> bool:
    while outer is not func and hasattr(outer, "__wrapped__"):
        outer = outer.__wrapped__
    return outer is func
