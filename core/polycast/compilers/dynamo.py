"""Regions under torch.compile and torch.export: what Dynamo is given, where it meets a region in what it traces.

Dynamo knows torch.autocast. It puts the entering and the leaving of one into its graph, and the graph's ops below it
are cast where AOTAutograd traces them, by the kernels at the Autocast key, which are polycast's. So a region becomes
one of torch's in the graph, and the code that is made is the code that torch.autocast would give.

Imported by Dynamo alone, when it traces the making of a region: nothing here costs a program that does not compile.
"""

import warnings
from typing import Any, NoReturn, TypeVar

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.ctx_manager import AutocastModeVariable

from ..engine.installation import kernels_of
from ..engine.state import Settings
from .torch_autocast import TorchAutocast, UnpatchedAutocast

_HAS_POLICY = "policy= is not part of torch's autocast, which is what a graph can hold"
_Region = TypeVar("_Region")

if "python_type" not in vars(AutocastModeVariable):
    # Asked of what a class's __new__ returns; later versions of torch have the same answer.
    setattr(AutocastModeVariable, "python_type", lambda self: TorchAutocast)


def region_in_graph(
    cls: type[_Region], *args: Any, cache: object = None, policy: object = None, **kwargs: Any
) -> _Region:
    """Return the region that is made in code that Dynamo traces; Dynamo traces this too.

    No cast is kept while ops are traced, so a cache would have no part in it.
    """
    region: _Region = _made_once(cls, policy is not None, *args, **kwargs)
    return region


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made_once(cls: type[_Region], has_policy: bool, *args: Any, **kwargs: Any) -> _Region:
    """Return a new region. Dynamo calls this while it traces, with constants, and keeps the answer.

    What the answer depends on, Dynamo guards: the constants, and the thread's dtype, which is part of the autocast
    state that every compiled function is guarded on.
    """
    if has_policy:
        _break(_HAS_POLICY)
    region = object.__new__(cls)
    region.__init__(*args, **kwargs)  # type: ignore[misc]
    return region


def check_region(settings: Settings, overridden: str | None) -> None:
    """Install the kernels that a region in a graph needs, or have Dynamo break the graph there.

    After a graph break the region is entered by the interpreter; under ``fullgraph=True`` the error is the user's.

    Args:
        settings: those of the region.
        overridden: the name of its class, where that enters or leaves in a way of its own.
    """
    if overridden is not None:
        _break(f"{overridden} has an __enter__ or __exit__ of its own")
    if settings.overlay is not None:
        _break(_HAS_POLICY)
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
