"""The autocast region: a context manager and a decorator that holds settings, and no state."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from ..compilers import cached_casts  # noqa: F401  it decides what the kernels do while code is compiled
from ..compilers.export import record_entry, record_exit
from ..compilers.torch_autocast import TorchAutocast
from ..compilers.torchscript import ScriptedAsTorch
from ..compilers.uncompiled import enters_regions, set_enter
from ..engine import state
from ..engine.casts.weight_cache import WeightCache
from ..engine.disable_dynamo import disable_dynamo
from ..engine.installation import also_put_in_place, fully_installed
from ..engine.state import Settings
from ..errors import AutocastDisabledWarning, warn_user
from ..plugins.backend import Availability, Backend
from ..plugins.discovery import check_availability, check_dtype
from ..plugins.registry import registry
from ..policy.recipe import RecipeLike
from ..policy.value import PolicyLike
from .checkpoint import carry_regions
from .decorate import decorate
from .entry import fast_path, has_more_than_torch, put_in_place
from .policies import override_of, with_recipe
from .recipes import usable_recipe
from .suspend import Suspendable

_F = TypeVar("_F", bound=Callable[..., Any])


_new = object.__new__
also_put_in_place.append(carry_regions)


@enters_regions
class autocast(TorchAutocast):
    """A region in which ops run in mixed precision; a context manager, and a decorator of functions.

    In place of ``torch.autocast``: the arguments mean what they mean there. An instance holds settings only, so that
    one can be nested in itself, shared by threads and reused. As a decorator it is in force while the body of the
    function runs: between the steps of a generator or a coroutine it is not.

    Args:
        device_type: the device whose ops to autocast, as torch spells it: ``"cpu"``, ``"cuda"``, ``"xpu"``, ...
        dtype: the fast dtype. None: this thread's current one, which at first is the backend's default.
        enabled: False for a region in which autocast is off.
        cache_enabled: whether to keep the casts of weights until the thread leaves its outermost region. None: as it
            is on this thread, at first True.
        cache: where casts of weights are kept, also after the region. None: where the enclosing region keeps them; in
            the outermost one, in a cache of the thread's own, which is dropped with it.
        policy: which ops have another policy in this region and those inside it, over the backend's table: a
            :class:`Policy`, a mapping such as ``{"softmax": "fp32"}``, or the path of a policy file.
        recipe: the numbers below the fast dtype in which products are computed in this region and those inside it: such
            as :class:`Int8`, or its name. None: those of the enclosing region; ``"none"`` or :class:`NoRecipe`: none.

    Attributes:
        device: the device type.
        fast_dtype: the fast dtype.

    Raises:
        ValueError: `device_type` is not a str; `policy` is refused by :class:`Policy`, or its file is no policy file.
        OSError: the file of `policy` cannot be read.
        TypeError: `dtype` is not a torch.dtype, `cache_enabled` not a bool, `cache` not a WeightCache, or `recipe` no
            recipe.
        RuntimeError: torch does not know the device string; or no backend serves it (see
            :func:`polycast.get_backend`).

    Warns:
        AutocastDisabledWarning: the device cannot be used now, or its backend does not support the dtype. The region
            runs with autocast disabled.
        RecipeDisabledWarning: the device cannot compute by the recipe. The region runs in the fast dtype.

    Example:
        >>> import torch, polycast
        >>> x, w = torch.randn(4, 4), torch.randn(4, 4)
        >>> with polycast.autocast("cpu"):
        ...     print((x @ w).dtype, torch.exp(x).dtype)
        torch.bfloat16 torch.float32
    """

    _jit_override_qualname = ScriptedAsTorch()
    __jit_unused_properties__ = ["_cache_enabled"]
    _fast_path: object
    """What leaves nothing to entering but state, as long as it is fully installed: the device; where the region has
    policies or a cache, the kernels that it or its override was entered with, and None until then."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a new region; to Dynamo, which traces this, one that it has a place for in its graphs."""
        if is_dynamo_compiling():
            from ..compilers.dynamo import region_in_graph  # Dynamo is imported by those who compile

            return region_in_graph(cls, *args, **kwargs)
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
        try:
            backend = registry.ready[device_type]
        except (KeyError, TypeError):
            backend = registry.find(device_type)
        if dtype is None:
            dtype = backend.default_dtype
            if state.machine.dtype(backend.device_type) is not dtype:
                dtype = state.current_dtype(backend.device_type, dtype)
        elif not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
        if enabled:
            answer = check_availability(backend)
            if not answer.available or dtype is not backend.default_dtype:
                refusal = why_disabled(backend, dtype, answer)
                if refusal is not None:
                    warn_user(refusal, AutocastDisabledWarning)
                    enabled = False
        if cache_enabled is not None and not isinstance(cache_enabled, bool):
            raise TypeError(f"cache_enabled must be a bool or None, got {cache_enabled!r}")
        self.device = self._fast_path = backend.device_type
        self.fast_dtype = dtype
        if cache is None and policy is None and recipe is None:
            self._settings = _plain_settings(self.device, bool(enabled), dtype, cache_enabled)
        else:
            _check_cache(cache, cache_enabled)
            override = None if policy is None else override_of(policy, self.device)
            if recipe is not None:
                override = with_recipe(override, usable_recipe(recipe, backend, bool(enabled)))
            self._settings = Settings(self.device, bool(enabled), dtype, cache_enabled, override, cache)
            self._fast_path = fast_path(self._settings)

    # For any engine; one that has its own puts these in their place, see StateMachine.region_methods.
    @disable_dynamo
    def __enter__(self) -> Self:
        recorded = state.machine.enter(self, self._settings)
        try:
            if recorded or self._fast_path not in fully_installed:
                self._complete_entry(recorded)
        except BaseException:
            state.machine.leave(self)
            raise
        return self

    @disable_dynamo
    def __exit__(self, *exc_info: object) -> None:
        recorded = state.machine.leave(self)
        if recorded is not False:
            self._complete_exit(recorded)

    @disable_dynamo
    def _complete_entry(self, recorded: bool) -> None:
        """Do what entering a region may take besides the state."""
        settings = self._settings
        kernels = put_in_place(settings)
        if has_more_than_torch(settings):
            self._fast_path = kernels
        if recorded:
            record_entry(settings)

    @disable_dynamo
    def _complete_exit(self, recorded: bool | None) -> None:
        """Do what leaving a region may take besides the state; None where there was nothing to leave."""
        if recorded is None:
            raise state.not_entered(self)
        record_exit()

    def __call__(self, func: _F) -> _F:
        """Return `func` wrapped so that its body runs in the region."""
        if not callable(func):
            raise TypeError(
                f"autocast()(func) requires a callable, but got {type(func).__name__}. To run a block in the region, "
                f"write: with polycast.autocast({self.device!r}): ..."
            )
        return decorate(func, lambda: self, self._suspendable)

    def _suspendable(self) -> Suspendable:
        return Suspendable(self._settings)

    @property
    def _enabled(self) -> bool:  # type: ignore[override]
        """What Dynamo and TorchScript read of a region, with the public attributes and, Dynamo, the one below."""
        return self._settings.enabled

    @property
    def _cache_enabled(self) -> bool | None:  # type: ignore[override]
        from ..compilers.dynamo import cache_enabled_in_graph

        kind = type(self)
        overridden = (kind.__enter__, kind.__exit__) != (autocast.__enter__, autocast.__exit__)
        found: bool | None = cache_enabled_in_graph(self._settings, kind.__qualname__ if overridden else None)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self._settings)

    def __repr__(self) -> str:
        settings = self._settings
        return f"autocast({self.device!r}, dtype={settings.dtype}, enabled={settings.enabled})"


# What is found of a signature, by people and by what makes the reference, is that of __new__, which takes anything.
setattr(autocast.__new__, "__wrapped__", autocast.__init__)

_methods_in_python = autocast.__enter__, autocast.__exit__


def _take_methods(machine: state.StateMachine) -> None:
    """Have regions entered and left by the methods of the engine in use."""
    completing = autocast._complete_entry, autocast._complete_exit
    own = machine.region_methods(autocast, fully_installed, *completing)
    enter, leave = own or _methods_in_python
    set_enter(autocast, enter)
    setattr(autocast, "__exit__", leave)


state.when_used.append(_take_methods)
_take_methods(state.machine)


def autocast_decorator(autocast_instance: autocast, func: _F) -> _F:
    """Return `func` wrapped so that its body runs in a region: what decorating with the instance does.

    Raises:
        TypeError: `func` is not callable.
    """
    return autocast_instance(func)


def _restored(cls: type[autocast], settings: Settings) -> autocast:
    """Return a copied or unpickled region, where this process has a backend for it."""
    region = object.__new__(cls)
    registry.find(settings.device_type)
    region.device, region.fast_dtype, region._settings = settings.device_type, settings.dtype, settings
    region._fast_path = fast_path(settings)
    return region


def why_disabled(backend: Backend, dtype: torch.dtype, answer: Availability) -> str | None:
    """Say why a region cannot run enabled, or nothing if it can, given what its backend answered for the device."""
    if not answer.available:
        return f"{backend.device_type} is not available: {answer.reason}. Disabling autocast."
    if dtype is not backend.default_dtype:
        answer = check_dtype(backend, dtype)
        if not answer.available:
            return (
                f"In {backend.device_type.upper()} autocast, but the target dtype is not supported. "
                f"Disabling autocast.\n{dtype} was asked for: {answer.reason}."
            )
    return None


# A program has few regions and enters them often, and a look-up is cheaper than a new tuple.
_plain_settings = functools.lru_cache(maxsize=256)(Settings)


def _check_cache(cache: WeightCache | None, cache_enabled: bool | None) -> None:
    if not isinstance(cache, (WeightCache, type(None))):
        raise TypeError(f"cache must be a polycast.WeightCache or None, got {cache!r}")
    if cache is not None and cache_enabled is False:
        raise ValueError("cache= asks to keep casts and cache_enabled=False not to: leave out one of the two")
