"""Regions under torch.compile and torch.export: what Dynamo is given, where it meets a region in what it traces.

Dynamo knows torch.autocast. It puts the entering and the leaving of one into its graph, and the graph's ops below it
are cast where AOTAutograd traces them, by the kernels at the Autocast key, which are polycast's. So a region becomes
one of torch's in the graph, and the code that is made is the code that torch.autocast would give. A region with
policies or a cache is entered by a function of polycast's there, which has the policies as a text, and of the cache the
number by which it is known in this process.

Imported by Dynamo alone, when it traces the making of a region: nothing here costs a program that does not compile.
"""

import functools
import threading
import warnings
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx.node import has_side_effect
from typing_extensions import Self

from ..engine import state
from ..engine.casts.cached_cast import enter_in_graph, leave_in_graph
from ..engine.casts.weight_cache import WeightCache, cache_by_identity
from ..engine.disable_dynamo import disable_dynamo
from ..engine.installation import also_put_in_place, kernels_of
from ..engine.state import MODULE_RULE, Origin, Override, Settings
from ..policy.recipe import Recipe, read_recipe
from ..torch_internals import changes
from ..torch_internals.lookup import find
from ..torch_internals.patcher import Patch, method_of
from . import backward, cached_casts, nested_regions, uncompiled
from .guards import tell_policies_apart
from .torch_autocast import TorchAutocast, UnpatchedAutocast

_HAS_POLICY = "of policy= a graph can hold a dict of names, that what is compiled makes or is given"
_NO_PLACE = "graphs of this torch hold no policy=, recipe= or cache="
_Region = TypeVar("_Region")


class region_with_more:
    """A region with policies or a cache, of constants: what a graph enters, and what goes on after a break."""

    def __new__(cls, *values: Any) -> Self:
        """Return a new region; to Dynamo, which traces what comes after a break, one that graphs have a place for."""
        if is_dynamo_compiling():
            return _entered_again(*values)  # type: ignore[no-any-return]
        return object.__new__(cls)

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        enabled: bool,
        cache_enabled: bool | None,
        cache: int,
        policies: str,
        *origin: str,
    ) -> None:
        override = Override.of_text(policies, Origin(*origin)) if policies else None
        self._settings = Settings(device_type, enabled, dtype, cache_enabled, override, cache_by_identity(cache))

    @disable_dynamo
    def __enter__(self) -> Self:
        kernels_of(self._settings.device_type, self._settings.override or ())
        for put in also_put_in_place:
            put()
        state.machine.enter(self, self._settings)
        enter_in_graph(self._settings.cache)
        _thread.entered.append(self)
        return self

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        _thread.entered.remove(self)
        leave_in_graph(self._settings.cache)
        state.machine.leave(self)


@has_side_effect
def enter_with_more(*values: Any) -> region_with_more:
    """Enter a region, in a graph; what comes back is left by what leaves torch's regions there."""
    return region_with_more(*values).__enter__()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _entered_again(device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None, *more: Any) -> Any:
    region: Any = object.__new__(UnpatchedAutocast)
    region.device, region.fast_dtype, region._enabled = device_type, dtype, enabled
    region._cache_enabled = _AndMore(cache_enabled, more)
    return region


def let_graphs_hold_more(patch: Patch) -> None:
    """Have Dynamo make regions with policies or a cache of those that :func:`_give_more` has marked."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    init: Any = method_of(AutocastModeVariable, "__init__", "self", "target_values")

    class RegionWithMoreVariable(AutocastModeVariable):
        """A region with policies or a cache, to Dynamo."""

        def enter(self, tx: Any) -> Any:
            region = enter_with_more(*self.target_values)
            self.set_cleanup_hook(tx, lambda: region.__exit__())
            self.proxy = tx.output.create_node("call_function", enter_with_more, (*self.target_values,), {})
            return ConstantVariable.create(None)

        def module_name(self) -> str:
            return __name__

        def fn_name(self) -> str:
            return region_with_more.__name__

    @functools.wraps(init)
    def init_with_more(self: Any, target_values: Any, *args: Any, **kwargs: Any) -> None:
        init(self, target_values, *args, **kwargs)
        *values, last = target_values
        if isinstance(last, _AndMore):
            self.__class__ = RegionWithMoreVariable
            self.target_values = [*values, last.cache_enabled, *last.more]

    patch.replace(AutocastModeVariable, "__init__", init_with_more)
    if "python_type" not in vars(AutocastModeVariable):
        # Asked of what a class's __new__ returns; later versions of torch have the same answer.
        patch.replace(AutocastModeVariable, "python_type", lambda self: TorchAutocast)


def leave_regions_of_graphs(patch: Patch) -> None:
    """Leave the regions of a graph that fails in them: Dynamo takes back what torch has of them."""
    from torch._dynamo.output_graph import OutputGraph

    call_user_compiler: Any = method_of(OutputGraph, "call_user_compiler", "self")

    @functools.wraps(call_user_compiler)
    def call_user_compiler_and_leave(*args: Any, **kwargs: Any) -> Any:
        before = len(_thread.entered)
        try:
            return call_user_compiler(*args, **kwargs)
        finally:
            for region in reversed(_thread.entered[before:]):
                region.__exit__()

    patch.replace(OutputGraph, "call_user_compiler", call_user_compiler_and_leave)


class _AndMore(NamedTuple):
    """The cache_enabled of a region with policies or a cache, which Dynamo hands to where the region is entered."""

    cache_enabled: bool | None
    more: tuple[Any, ...]
    """The cache, the policies and their origin, as ``region_with_more`` takes them."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[region_with_more] = []
        """The regions in graphs that this thread is in."""


_thread = _Thread()


def region_in_graph(
    cls: type[_Region], *args: Any, cache: Any = None, policy: object = None, recipe: Any = None, **kwargs: Any
) -> _Region:
    """Return the region that is made in code that Dynamo traces; Dynamo traces this too."""
    text = recipe.text if isinstance(recipe, Recipe) else recipe
    # As a text: of a number that differs from call to call Dynamo would make a variable.
    number = cache.number if isinstance(cache, WeightCache) else "" if cache is None else "none"
    if policy is None or isinstance(policy, dict):
        return _made_once(cls, number, policy, text, *args, **kwargs)  # type: ignore[no-any-return]
    return _made_once(cls, number, {}, text, *args, **kwargs)  # type: ignore[no-any-return]


def _prepare() -> None:
    """Prepare Dynamo for the regions that it traces."""
    nested_regions.tell_apart()
    changes.make(changes.REGIONS_IN_GRAPHS)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made_once(
    cls: type[_Region], number: str, policy: dict[str, Any] | None, recipe: str | None, *args: Any, **kwargs: Any
) -> _Region:
    """Return a new region. Dynamo calls this while it traces, with constants, and keeps the answer.

    What the answer depends on, Dynamo guards: the constants, and the thread's dtype, which is part of the autocast
    state that every compiled function is guarded on.
    """
    _prepare()
    if policy is not None or recipe is not None:
        _check_policies_can_be_held()
    if policy == {}:
        _break(_HAS_POLICY)
    if number == "none":
        _break("its cache= is no WeightCache")
    cache = cache_by_identity(int(number)) if number and cached_casts.can_be() else None
    region = object.__new__(cls)
    more: dict[str, Any] = {"policy": policy, "cache": cache, "recipe": recipe and _recipe_of(recipe)}
    region.__init__(*args, **kwargs, **{name: each for name, each in more.items() if each is not None})  # type: ignore[misc]
    settings: Settings = vars(region)["_settings"]
    _give_more(region, settings.override, settings.cache)
    return region


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def region_of_rule(
    cls: type[_Region], device_type: str, dtype: torch.dtype | None, enabled: bool, policies: str, rule: str
) -> _Region:
    """Return the region that a rule for a module opens, with policies as the text of an override."""
    _prepare()
    _check_policies_can_be_held()
    region = object.__new__(cls)
    region.__init__(device_type, dtype, enabled)  # type: ignore[misc]
    _give_more(region, Override.of_text(policies, MODULE_RULE._replace(name=rule)), None)
    return region


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rule_decides(device_type: str) -> None:
    """Note that a rule for a module decides in what is being compiled."""
    tell_policies_apart(device_type)
    backward.mark()


def _recipe_of(text: str) -> Recipe:
    return Recipe.of_text(text) if " " in text else read_recipe(text)


def _check_policies_can_be_held() -> None:
    if torch.compiler.is_exporting():
        _break("policies and recipes are not part of torch's autocast, which is what an exported program can hold")
    if uncompiled.in_effect():
        _break("policies cannot be told apart in this torch")


def _give_more(region: Any, policies: Override | None, cache: WeightCache | None) -> None:
    if policies is None and cache is None:
        return
    if policies is not None:
        tell_policies_apart(region.device)
        backward.mark()
    if changes.is_refused(changes.REGIONS_IN_GRAPHS):
        _break(_NO_PLACE)
    more = (
        0 if cache is None else cache.identity,
        *(("",) if policies is None else (policies.text, *policies.origin)),
    )
    and_more: Any = _AndMore(region._settings.cache_enabled, more)
    region._settings = region._settings._replace(override=None, cache=None, cache_enabled=and_more)


def cache_enabled_in_graph(settings: Settings, overridden: str | None) -> Any:
    """Return what Dynamo takes for a region's cache_enabled, as it has the region in a graph.

    Installs the kernels that the region needs there, or has Dynamo break the graph. After a graph break the region is
    entered by the interpreter; under ``fullgraph=True`` the error is the user's.

    Args:
        settings: those of the region.
        overridden: the name of its class, where that enters or leaves in a way of its own.
    """
    _prepare()
    if overridden is not None:
        _break(f"{overridden} has an __enter__ or __exit__ of its own")
    if settings.override is not None:
        _break("it has a policy= or a recipe= and was made outside of what is compiled")
    if settings.enabled:
        if not _torch_enables(settings):
            _break(f"torch.autocast does not run {settings.dtype} on {settings.device_type}")
        kernels_of(settings.device_type)
    if settings.cache is not None and cached_casts.can_be():
        if changes.is_refused(changes.REGIONS_IN_GRAPHS):
            _break(_NO_PLACE)
        return _AndMore(settings.cache_enabled, (settings.cache.identity, ""))
    return settings.cache_enabled


def _torch_enables(settings: Settings) -> bool:
    """Say whether a region of torch's with these settings is enabled; it knows fewer dtypes than backends may have."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(UnpatchedAutocast(settings.device_type, settings.dtype)._enabled)
    except (AssertionError, RuntimeError):
        return False


def _break(reason: str) -> NoReturn:
    try:
        unimplemented = find("torch._dynamo.exc.unimplemented")
    except (AttributeError, ImportError):
        raise RuntimeError(f"polycast: this region cannot be traced: {reason}.") from None
    unimplemented(
        gb_type="polycast.autocast that torch.autocast cannot stand for",
        context="",
        explanation=f"polycast: this region cannot be traced: {reason}.",
        hints=["Compile functions that are called in the region, and make the region outside of them."],
    )
    raise AssertionError  # unimplemented has raised
