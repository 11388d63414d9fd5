"""custom_fwd and custom_bwd: autocast in the forward and backward of a torch.autograd.Function.

``backward`` has to run in the autocast state of ``forward``, and ``ctx`` is all that the two share. In the style with
``setup_context``, forward takes no ctx. setup_context gets it right after forward, in the same autocast state, but is
not decorated. So a decorated forward finds the classes that have it, and makes the setup_context of each record the
state. It searches all subclasses of Function, because a function does not know its classes, and the class being applied
need not be in any frame.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch.autograd import Function, function
from torch.autograd.function import FunctionCtx

from ..engine import state
from ..engine.state import Settings
from ..registry.registry import registry
from ..torch_internals import changes
from .cast_arguments import CastArguments
from .suspend import Regions
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
        device_type: the device whose autocast state the function follows.
        cast_inputs: None: ``forward`` runs in the autocast state of the caller. A dtype: if autocast is enabled,
            eligible tensors among the inputs (also in containers) are cast to it, and ``forward`` runs with autocast
            disabled. Its writes to a cast do not reach the caller, as with torch's decorator; its changes of a list or
            a dict do. If autocast is disabled, it has no effect.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.

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
        # The names that torch.amp's decorators use, so that either half may be torch's.
        ctx._dtype = get_autocast_dtype(device_type)
        ctx._fwd_used_autocast = cast_inputs is None and is_autocast_enabled(device_type)
        ctx._polycast_region = state.machine.innermost(device_type)

    @functools.wraps(fwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], FunctionCtx):
            record(args[0])
        else:
            for cls in classes():
                _record_in_setup_context(cls)
        if cast_inputs is None or not is_autocast_enabled(device_type):
            return fwd(*args, **kwargs)
        casts = CastArguments(device_type, cast_inputs, in_place=False)
        try:
            args = tuple([casts.of(value) for value in args])
            kwargs = {name: casts.of(value) for name, value in kwargs.items()}
            return Regions(Settings(device_type, False, get_autocast_dtype(device_type))).call(fwd, *args, **kwargs)
        finally:
            casts.restore()

    _records[decorated] = record
    classes = _ClassesOf(decorated)
    return decorated


@overload
def custom_bwd(bwd: _F, *, device_type: str) -> _F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[_F], _F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate the ``backward`` of a torch.autograd.Function: it runs in the autocast state of its ``forward``.

    Args:
        bwd: the function; None to use this as a decorator with arguments.
        device_type: the device, as given to :func:`custom_fwd`.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`. The decorated function raises RuntimeError if
            ``forward`` is not decorated with :func:`custom_fwd`.
    """
    device_type = registry.find(device_type).device_type
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            override, cache = getattr(ctx, "_polycast_region", (None, None))
            settings = Settings(device_type, ctx._fwd_used_autocast, ctx._dtype, None, override, cache, absolute=True)
        except AttributeError:
            raise RuntimeError(
                f"{bwd.__qualname__} is decorated with custom_bwd, but its forward did not record its autocast state. "
                "Decorate forward with polycast.custom_fwd."
            ) from None
        return Regions(settings).call(bwd, ctx, *args, **kwargs)

    return decorated


class _ClassesOf:
    """The classes whose forward is a function, or wraps it; searched again after a Function class was created."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._known: tuple[object, list[weakref.ref[type[Function]]]] = (None, [])

    def __call__(self) -> Iterator[type[Function]]:
        counter = getattr(function, "AUTOGRAD_FUNCTION_COUNTER", None)  # of the classes that were made
        made = object() if counter is None else repr(counter)
        if made != self._known[0] or not self._known[1]:
            having = [cls for cls in _all_functions() if any(layer is self._forward for layer in _layers(cls))]
            self._known = made, [weakref.ref(cls) for cls in having]
        return (cls for known in self._known[1] if (cls := known()) is not None)


def _all_functions() -> list[type[Function]]:
    classes = [Function]
    for cls in classes:
        classes += type.__subclasses__(cls)
    return classes


# Not attributes, which functools.wraps would copy.
_records: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
"""By decorated forward, the function that records the state in a ctx."""
_recording: weakref.WeakKeyDictionary[Any, tuple[Any, list[Callable[[Any], None]], Any]] = weakref.WeakKeyDictionary()
"""By wrapped setup_context: the original, the functions that record, and the attribute of the class before, if any."""


def _record_in_setup_context(cls: type[Function]) -> None:
    """Wrap the setup_context of a class, to record what the decorators of its forward do, until uninstall()."""
    if cls.setup_context is Function.setup_context:  # its forward takes a ctx, and was called directly
        return
    records = [_records[layer] for layer in _layers(cls) if layer in _records]
    given, recorded, before = _recording.get(cls.setup_context, (cls.setup_context, [], None))
    own = vars(cls).get("setup_context")
    if own is None or _function(own) not in _recording:
        before = own
    if recorded == records:
        return

    @functools.wraps(given)
    def recording(ctx: Any, inputs: Any, output: Any) -> Any:
        for record in records:
            record(ctx)
        return given(ctx, inputs, output)

    _recording[recording] = given, records, before
    changes.SETUP_CONTEXT.make()
    setattr(cls, "setup_context", staticmethod(recording))


def restore_setup_context() -> None:
    """Restore the ``setup_context`` of all classes."""
    for cls in _all_functions():
        own = vars(cls).get("setup_context")
        if own is None or _function(own) not in _recording:
            continue
        before = _recording[_function(own)][2]
        if before is None:
            delattr(cls, "setup_context")
        else:
            setattr(cls, "setup_context", before)


def _function(attribute: Any) -> Any:
    """Return the function of a class attribute, which usually is a staticmethod."""
    return getattr(attribute, "__func__", attribute)


def _layers(cls: type[Function]) -> list[Any]:
    """Return the forward of a class and the functions that it wraps, the outermost first."""
    layers: list[Any] = []
    layer: Any = cls.forward
    while layer is not None and all(layer is not other for other in layers):
        layers.append(layer)
        layer = getattr(layer, "__dict__", {}).get("__wrapped__")
    return layers
