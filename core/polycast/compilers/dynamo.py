"""Replace the regions that traced code makes by regions that Dynamo can put into graphs.

Dynamo knows torch.autocast. It puts the entering and the leaving of a region into its graph, and AOTAutograd traces the
ops between them with the kernels at the Autocast key, which are polycast's. So a region becomes one of torch's in the
graph, and compiles to the code that torch.autocast gives; one with an override or a cache is in graph_regions.py.

Imported when Dynamo traces the making of a region.
"""

import warnings
from typing import Any, NoReturn, TypeVar

import torch

from ..engine.casts.cast_cache import CastCache, caches_alive
from ..engine.casts.traced import can_leave_casts
from ..engine.installation import kernels_of, support_overrides
from ..engine.override import MODULE_RULE, Override, make_override
from ..engine.state import Settings
from ..policy.recipe import Recipe
from ..torch_internals import changes
from ..torch_internals.lookup import find
from . import backward
from .torch_autocast import UnpatchedAutocast

_DICT_ONLY = "a graph can hold a policy= only as a dict of names, made by the compiled code or passed to it"
_Region = TypeVar("_Region")


def region_in_graph(
    cls: type[_Region], *args: Any, cache: Any = None, policy: object = None, recipe: Any = None, **kwargs: Any
) -> _Region:
    """Return the region that traced code makes; Dynamo traces this function, too."""
    text = recipe.text if isinstance(recipe, Recipe) else recipe
    # As a text: Dynamo would make a variable of a number that differs from call to call.
    number = cache.number if isinstance(cache, CastCache) else "" if cache is None else "none"
    given = policy if policy is None or isinstance(policy, dict) else {}
    return _made_once(cls, number, given, text, *args, **kwargs)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made_once(
    cls: type[_Region], number: str, policy: dict[str, Any] | None, recipe: str | None, *args: Any, **kwargs: Any
) -> _Region:
    """Return a new region. Dynamo calls this while it traces, with constants, and keeps the answer.

    Dynamo guards everything that the answer depends on: the constants, and the thread's dtype, which is part of the
    autocast state that it guards all code on.
    """
    _prepare_dynamo()
    if policy is not None or recipe is not None:
        _check_override_can_be_held()
    if policy == {}:
        _break(_DICT_ONLY)
    if number == "none":
        _break("its cache= is not a WeightCache")
    cache = caches_alive.get(int(number)) if number and can_leave_casts() else None
    region = object.__new__(cls)
    given = Recipe.of_text(recipe) if recipe and "(" in recipe else recipe
    more: dict[str, Any] = {"policy": policy, "cache": cache, "recipe": given}
    region.__init__(*args, **kwargs, **{name: each for name, each in more.items() if each is not None})  # type: ignore[misc]
    settings: Settings = vars(region)["_settings"]
    _move_to_graph(region, settings.override, settings.cache)
    return region


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def region_of_rule(
    cls: type[_Region], device_type: str, dtype: torch.dtype | None, enabled: bool, override: str, rule: str
) -> _Region:
    """Return the region of a rule for a module, with its override as text."""
    _prepare_dynamo()
    _check_override_can_be_held()
    region = object.__new__(cls)
    region.__init__(device_type, dtype, enabled)  # type: ignore[misc]
    found = Override.of_text(device_type, override, MODULE_RULE, rule)
    if found.recipe is not None:
        from ..engine.recipes.plan import resolved  # few programs have a rule with a recipe

        recipe = resolved(found.recipe, device_type, measure=True)
        found = make_override(device_type, frozenset(found.policies.items()), MODULE_RULE, rule, recipe, None)
    _move_to_graph(region, found, None)
    return region


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_rule(device_type: str) -> None:
    """Note that what is being compiled depends on a rule for a module."""
    support_overrides(device_type, None)
    backward.mark()


def cache_enabled_in_graph(settings: Settings, overridden: str | None) -> Any:
    """Return what Dynamo reads as a region's cache_enabled when it puts the region into a graph.

    Installs the kernels that the region needs there, or breaks the graph: then the interpreter enters the region, or
    the user gets the error, under ``fullgraph=True``.

    Args:
        settings: those of the region.
        overridden: the name of its class, if that has an ``__enter__`` or ``__exit__`` of its own.
    """
    _prepare_dynamo()
    if overridden is not None:
        _break(f"{overridden} has an __enter__ or __exit__ of its own")
    if settings.override is not None:
        _break("it has a policy= or a recipe= and was made outside of the compiled code")
    if settings.enabled:
        if not _torch_enables(settings):
            _break(f"torch.autocast does not run {settings.dtype} on {settings.device_type}")
        kernels_of(settings.device_type)
    if settings.cache is not None and can_leave_casts():
        return _for_graph(settings.cache_enabled, settings.cache, None)
    return settings.cache_enabled


def _prepare_dynamo() -> None:
    changes.NESTED_REGIONS.make()
    changes.REGIONS_IN_GRAPHS.make()
    changes.GRAPHS_ON_DISK.make()


def _check_override_can_be_held() -> None:
    if torch.compiler.is_exporting():
        _break("an exported program holds torch's autocast, which has no policies or recipes")
    if not changes.overrides_are_guarded():
        _break("this torch cannot guard compiled code on policies")


def _move_to_graph(region: Any, override: Override | None, cache: CastCache | None) -> None:
    """Move override and cache of a region into its cache_enabled, which Dynamo passes to where it is entered."""
    if override is None and cache is None:
        return
    if override is not None:
        support_overrides(region.device, override)
        backward.mark()
    cache_enabled: Any = _for_graph(region._settings.cache_enabled, cache, override)
    region._settings = region._settings._replace(override=None, cache=None, cache_enabled=cache_enabled)


def _for_graph(cache_enabled: bool | None, cache: CastCache | None, override: Override | None) -> tuple[Any, ...]:
    """Return what a graph has in place of cache_enabled; see :class:`.graph_regions.region_with_override`."""
    if changes.REGIONS_IN_GRAPHS.is_refused():
        _break("graphs of this torch cannot hold policy=, recipe= or cache=")
    texts = ("",) if override is None else (override.text, *override.origin)
    return cache_enabled, 0 if cache is None else cache.identity, *texts


def _torch_enables(settings: Settings) -> bool:
    """Return whether torch's region with these settings is enabled; it knows fewer dtypes than backends may have."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(UnpatchedAutocast(settings.device_type, settings.dtype)._enabled)
    except (AssertionError, RuntimeError):
        return False


def _break(reason: str) -> NoReturn:
    break_graph(
        "polycast.autocast without an equivalent torch.autocast",
        f"this region cannot be traced: {reason}.",
        "Compile functions that are called in the region, and make the region outside of them.",
    )


def break_graph(what: str, explanation: str, hint: str) -> NoReturn:
    """Break the graph, from a function that Dynamo calls while it traces.

    The interpreter runs the code, or the user gets an error (``fullgraph``) with the explanation, a sentence. `what` is
    the same text for each graph that is broken for the same reason.
    """
    try:
        unimplemented = find("torch._dynamo.exc.unimplemented")
    except (AttributeError, ImportError):
        raise RuntimeError(f"polycast: {explanation}") from None
    unimplemented(gb_type=what, context="", explanation=f"polycast: {explanation}", hints=[hint])
    raise AssertionError  # unimplemented has raised
