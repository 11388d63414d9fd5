"""Regions under torch.compile and torch.export: what Dynamo is given, where it meets a region in what it traces.

Dynamo knows torch.autocast. It puts the entering and the leaving of one into its graph, and the graph's ops below it
are cast where AOTAutograd traces them, by the kernels at the Autocast key, which are polycast's. So a region becomes
one of torch's in the graph, and the code that is made is the code that torch.autocast would give. A region with
policies is entered by a function of polycast's there, which has them as a text.

Imported by Dynamo alone, when it traces the making of a region: nothing here costs a program that does not compile.
"""

import warnings
from typing import Any, NoReturn, TypeVar

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.ctx_manager import AutocastModeVariable
from torch.compiler import is_dynamo_compiling
from torch.fx.node import has_side_effect
from typing_extensions import Self

from ..engine import state
from ..engine.disable_dynamo import disable_dynamo
from ..engine.installation import also_put_in_place, kernels_of
from ..engine.state import MODULE_RULE, Origin, Overlay, Settings
from . import backward, nested_regions, uncompiled
from .guards import tell_policies_apart
from .torch_autocast import TorchAutocast, UnpatchedAutocast

_HAS_POLICY = "of policy= a graph can hold a dict of names, that what is compiled makes or is given"
_Region = TypeVar("_Region")


class region_with_policies:
    """A region with policies, of constants that code can hold: what a graph enters, and what goes on after a break."""

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
        policies: str,
        *origin: str,
    ) -> None:
        overlay = Overlay.of_text(policies, Origin(*origin))
        self._settings = Settings(device_type, enabled, dtype, cache_enabled, overlay)

    @disable_dynamo
    def __enter__(self) -> Self:
        kernels_of(self._settings.device_type, self._settings.overlay or ())
        for put in also_put_in_place:
            put()
        state.machine.enter(self, self._settings)
        return self

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        state.machine.leave(self)


@has_side_effect
def enter_with_policies(*values: Any) -> region_with_policies:
    """Enter a region, in a graph; what comes back is left by what leaves torch's regions there."""
    return region_with_policies(*values).__enter__()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _entered_again(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None, policies: str, *origin: str
) -> Any:
    region: Any = object.__new__(UnpatchedAutocast)
    region.fast_dtype, region._enabled, region._cache_enabled = dtype, enabled, cache_enabled
    region.device = _WithPolicies(device_type)
    region.device.policies = Overlay.of_text(policies, Origin(*origin))
    return region


class _PolicyRegionVariable(AutocastModeVariable):
    """A region with policies, to Dynamo."""

    def enter(self, tx: Any) -> Any:
        region = enter_with_policies(*self.target_values)
        self.set_cleanup_hook(tx, lambda: region.__exit__())
        self.proxy = tx.output.create_node("call_function", enter_with_policies, (*self.target_values,), {})
        return ConstantVariable.create(None)

    def module_name(self) -> str:
        return __name__

    def fn_name(self) -> str:
        return region_with_policies.__name__


_init = AutocastModeVariable.__init__


def _init_with_policies(self: Any, target_values: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, target_values, *args, **kwargs)
    device = target_values[0]
    if isinstance(device, _WithPolicies):
        self.__class__ = _PolicyRegionVariable
        self.target_values = [str(device), *target_values[1:], device.policies.text, *device.policies.origin]


setattr(AutocastModeVariable, "__init__", _init_with_policies)

if "python_type" not in vars(AutocastModeVariable):
    # Asked of what a class's __new__ returns; later versions of torch have the same answer.
    setattr(AutocastModeVariable, "python_type", lambda self: TorchAutocast)


class _WithPolicies(str):
    """The device of a region with policies, which Dynamo hands to where the region is entered."""

    policies: Overlay


def region_in_graph(
    cls: type[_Region], *args: Any, cache: object = None, policy: object = None, **kwargs: Any
) -> _Region:
    """Return the region that is made in code that Dynamo traces; Dynamo traces this too.

    No cast is kept while ops are traced, so a cache would have no part in it.
    """
    if policy is None or isinstance(policy, dict):
        return _made_once(cls, policy, *args, **kwargs)  # type: ignore[no-any-return]
    return _made_once(cls, {}, *args, **kwargs)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made_once(cls: type[_Region], policy: dict[str, Any] | None, *args: Any, **kwargs: Any) -> _Region:
    """Return a new region. Dynamo calls this while it traces, with constants, and keeps the answer.

    What the answer depends on, Dynamo guards: the constants, and the thread's dtype, which is part of the autocast
    state that every compiled function is guarded on.
    """
    nested_regions.tell_apart()
    if policy is not None:
        _check_policies_can_be_held()
    if policy == {}:
        _break(_HAS_POLICY)
    region = object.__new__(cls)
    region.__init__(*args, **kwargs, **({} if policy is None else {"policy": policy}))  # type: ignore[misc]
    settings: Settings = vars(region)["_settings"]
    if settings.overlay is not None:
        _give_policies(region, settings.overlay)
    return region


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def region_of_rule(
    cls: type[_Region], device_type: str, dtype: torch.dtype | None, enabled: bool, policies: str, rule: str
) -> _Region:
    """Return the region that a rule for a module opens, with policies as the text of an overlay."""
    _check_policies_can_be_held()
    region = object.__new__(cls)
    region.__init__(device_type, dtype, enabled)  # type: ignore[misc]
    _give_policies(region, Overlay.of_text(policies, MODULE_RULE._replace(name=rule)))
    return region


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rule_decides(device_type: str) -> None:
    """Note that a rule for a module decides in what is being compiled."""
    tell_policies_apart(device_type)
    backward.mark()


def _check_policies_can_be_held() -> None:
    if torch.compiler.is_exporting():
        _break("policies are not part of torch's autocast, which is what an exported program can hold")
    if uncompiled.in_effect():
        _break("policies cannot be told apart in this torch")


def _give_policies(region: Any, policies: Overlay) -> None:
    tell_policies_apart(region.device)
    backward.mark()
    region.device = _WithPolicies(region.device)
    region.device.policies = policies
    region._settings = region._settings._replace(overlay=None)


def check_region(settings: Settings, overridden: str | None) -> None:
    """Install the kernels that a region in a graph needs, or have Dynamo break the graph there.

    After a graph break the region is entered by the interpreter; under ``fullgraph=True`` the error is the user's.

    Args:
        settings: those of the region.
        overridden: the name of its class, where that enters or leaves in a way of its own.
    """
    nested_regions.tell_apart()
    if overridden is not None:
        _break(f"{overridden} has an __enter__ or __exit__ of its own")
    if settings.overlay is not None:
        _break("it has a policy= and was made outside of what is compiled")
    if settings.enabled:
        if not _torch_enables(settings):
            _break(f"torch.autocast does not run {settings.dtype} on {settings.device_type}")
        kernels_of(settings.device_type)


def _torch_enables(settings: Settings) -> bool:
    """Say whether a region of torch's with these settings is enabled; it knows fewer dtypes than backends may have."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(UnpatchedAutocast(settings.device_type, settings.dtype)._enabled)
    except (AssertionError, RuntimeError):
        return False


def _break(reason: str) -> NoReturn:
    unimplemented(
        gb_type="polycast.autocast that torch.autocast cannot stand for",
        context="",
        explanation=f"polycast: this region cannot be traced: {reason}.",
        hints=["Compile functions that are called in the region, and make the region outside of them."],
    )
