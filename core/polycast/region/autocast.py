"""The autocast region: a context manager and a decorator that holds settings, and no state."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from ..compilers.export import record_entry, record_exit
from ..compilers.torch_autocast import ScriptedAsTorch, TorchAutocast
from ..engine import state
from ..engine.state import Settings
from ..registry.registry import registry
from ..torch_internals.private_names import disable_dynamo
from .resolve import enter, leave, prepare, resolve

if TYPE_CHECKING:
    from ..engine.casts.weight_cache import WeightCache
    from ..policy.recipe import RecipeLike
    from ..policy.value import PolicyLike
    from .suspend import Suspendable
else:
    PolicyLike = RecipeLike = Suspendable = WeightCache = Any  # for typing.get_type_hints, without the imports

_F = TypeVar("_F", bound=Callable[..., Any])

_new = object.__new__


class autocast(TorchAutocast):
    """Run ops in mixed precision, as a context manager or a decorator.

    The arguments of ``torch.autocast`` mean the same here. An instance holds settings only, so one can be nested in
    itself, shared by threads and reused. As a decorator it is active while the body of the function runs: not between
    the steps of a generator or a coroutine.

    Args:
        device_type: the device whose ops to autocast, as torch spells it: ``"cpu"``, ``"cuda"``, ``"xpu"``, ...; or
            ``"auto"``: the accelerator that torch finds when the region is made, else ``"cpu"``. `device` says which.
        dtype: the fast dtype. None: this thread's current one, which at first is the backend's default.
        enabled: False for a region in which autocast is off.
        cache_enabled: whether to cache casts of weights until the thread leaves its outermost region. None: as set on
            this thread, at first True.
        cache: a cache for casts of weights, which outlives the region. None: that of the enclosing region; the
            outermost region uses one of its own.
        policy: policies that override the backend's table in this region and those inside it: a :class:`Policy`, a
            mapping such as ``{"softmax": "fp32"}``, or the path of a policy file.
        recipe: how to compute matmuls in this region and those inside it: by quantized weights (:class:`Int8`,
            :class:`Int4`), the fastest way (:class:`Fastest`), or a recipe's name. None: as in the enclosing region;
            ``"none"`` or :class:`NoRecipe`: in the fast dtype.

    Raises:
        ValueError: `device_type` is not a str; `policy` is invalid, as :class:`Policy` says, or its file is.
        OSError: the file of `policy` cannot be read.
        TypeError: `dtype` is not a torch.dtype, `cache_enabled` not a bool, `cache` not a WeightCache, or `recipe` not
            a recipe.
        RuntimeError: torch does not know the device string, or no backend serves it (see
            :func:`polycast.plugin.get_backend`).

    Warns:
        AutocastDisabledWarning: the device is not available, or its backend does not support the dtype. The region
            runs with autocast disabled.
        RecipeDisabledWarning: the device does not support the recipe. The region runs in the fast dtype.
        SlowDtypeWarning: the device emulates the dtype; once in a process.

    Example:
        >>> import torch, polycast
        >>> x, w = torch.randn(4, 4), torch.randn(4, 4)
        >>> with polycast.autocast("cpu"):
        ...     print((x @ w).dtype, torch.exp(x).dtype)
        torch.bfloat16 torch.float32
    """

    _settings: Settings
    _resolve = staticmethod(resolve)
    _jit_override_qualname = ScriptedAsTorch()
    __jit_unused_properties__ = ["_cache_enabled"]

    # With the keywords of __init__, Python need not collect them in a dict. Subclasses may have others.
    def __new__(cls, *args: Any, cache: Any = None, policy: Any = None, recipe: Any = None, **kwargs: Any) -> Self:
        """Return a new region; to Dynamo, which traces this, one that its graphs can hold."""
        if is_dynamo_compiling():
            from ..compilers.dynamo import region_in_graph  # imports Dynamo

            return region_in_graph(cls, *args, cache=cache, policy=policy, recipe=recipe, **kwargs)
        return _new(cls)

    @disable_dynamo
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        cache: WeightCache | None = None,
        policy: PolicyLike | None = None,
        recipe: RecipeLike | None = None,
    ) -> None:
        self._settings, _ = resolve(device_type, dtype, enabled, cache_enabled, cache, policy, recipe)

    # Programs may set these, as they may with torch's regions. A subclass may before __init__ sets the settings.
    @property
    def device(self) -> str:
        """The device type. Setting it changes the region from its next entry on."""
        return self._settings.device_type

    @device.setter
    def device(self, device_type: str) -> None:
        if "_settings" in vars(self):
            self._set(device_type, self.fast_dtype)

    @property
    def fast_dtype(self) -> torch.dtype:
        """The fast dtype. Setting it changes the region from its next entry on."""
        return self._settings.dtype

    @fast_dtype.setter
    def fast_dtype(self, dtype: torch.dtype) -> None:
        if "_settings" in vars(self):
            self._set(self.device, dtype)

    @disable_dynamo
    def _set(self, device_type: str, dtype: torch.dtype) -> None:
        now = self._settings
        if (device_type, dtype) == (now.device_type, now.dtype):
            return
        if now.override is not None:
            raise ValueError(
                "the device and the fast dtype of a region with policy= or recipe= cannot be set, got "
                f"{device_type!r} and {dtype}: make a region with them"
            )
        cache = cast("WeightCache | None", now.cache)
        self._settings, _ = resolve(device_type, dtype, now.enabled, now.cache_enabled, cache, None, None)

    @disable_dynamo
    def __enter__(self) -> Self:
        enter(self, self._settings)
        return self

    @disable_dynamo
    def __exit__(self, *exc_info: object) -> None:
        if not leave(self):
            raise state.not_entered(self)

    # Complete an entry and an exit for the native engine, whose own methods do the rest of both.
    @disable_dynamo
    def _complete_entry(self, in_function_mode: bool) -> None:
        prepare(self._settings)
        if in_function_mode:
            record_entry(self._settings)

    @disable_dynamo
    def _complete_exit(self, in_function_mode: bool | None) -> None:
        if in_function_mode is None:
            raise state.not_entered(self)
        record_exit()

    def __call__(self, func: _F) -> _F:
        """Return `func` wrapped so that its body runs in the region."""
        if not callable(func):
            raise TypeError(
                f"autocast()(func) requires a callable, but got {type(func).__name__}. To run a block in the region, "
                f"write: with polycast.autocast({self.device!r}): ..."
            )
        from .suspend import decorate, in_block  # most regions are blocks

        return decorate(func, in_block(self), self._suspendable)

    def _suspendable(self) -> Suspendable:
        from .suspend import Suspendable

        return Suspendable(self._settings)

    @property
    def _enabled(self) -> bool:  # type: ignore[override]
        """Return whether autocast is on, for TorchScript and Dynamo."""
        return self._settings.enabled

    @property
    def _cache_enabled(self) -> bool | None:  # type: ignore[override]
        from ..compilers.dynamo import cache_enabled_in_graph

        kind = type(self)
        overridden = (kind.__enter__, kind.__exit__) != (autocast.__enter__, autocast.__exit__)
        found: bool | None = cache_enabled_in_graph(self._settings, kind.__qualname__ if overridden else None)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        own = {name: value for name, value in vars(self).items() if name != "_settings"}
        return _restored, (type(self), self._settings), own or None

    def __repr__(self) -> str:
        from ..policy.names import OpName  # most programs print no regions

        settings = self._settings
        more: dict[str, object] = {"cache_enabled": settings.cache_enabled, "cache": settings.cache}
        if settings.override is not None:
            policies = settings.override.policies.items()
            more["policy"] = {
                OpName(OpName.of_overload(op).qualified, None).short: policy.value for op, policy in sorted(policies)
            } or None
            more["recipe"] = settings.override.recipe
        others = "".join(f", {name}={value!r}" for name, value in more.items() if value is not None)
        return f"autocast({self.device!r}, dtype={settings.dtype}, enabled={settings.enabled}{others})"


setattr(autocast.__new__, "__signature__", inspect.signature(autocast.__init__))  # __new__ takes any arguments
state.set_region_class(autocast)


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
        enter(self, self.entered()._settings, self._settings)
        return self

    @disable_dynamo
    def leave(self) -> bool:
        """Leave the region, and return whether this thread was in it; where ``with`` raises an error, it was not."""
        return leave(self)

    def decorate(self, func: _F, block: AbstractContextManager[Any], before: Callable[[], object]) -> _F:
        """Return `func` wrapped so that its body runs in the region.

        Args:
            func: a function, generator function, coroutine function or asynchronous generator function.
            block: the context manager that calls of plain functions run in: an object that enters this region.
            before: called before the body of another function starts.
        """
        from .suspend import decorate, in_block

        def suspendable() -> Suspendable:
            before()
            return self._suspendable()

        return decorate(func, in_block(block), suspendable)

    def _suspendable(self) -> Suspendable:
        from .suspend import Suspendable

        return Suspendable(self.entered()._settings)


def autocast_decorator(autocast_instance: autocast, func: _F) -> _F:
    """Return `func` wrapped so that its body runs in a region, as decorating it with the instance does.

    torch has a function of this name in ``torch.amp.autocast_mode``, which programs and libraries import.

    Raises:
        TypeError: `func` is not callable.
    """
    return autocast_instance(func)


def _restored(cls: type[autocast], settings: Settings) -> autocast:
    """Return a copied or unpickled region; raise if this process has no backend for it."""
    region = object.__new__(cls)
    registry.find(settings.device_type)
    region._settings = settings
    return region
