"""Entering a region on this thread, with its kernels in place."""

from ..compilers.guards import tell_policies_apart
from ..engine import state
from ..engine.installation import also_put_in_place, fully_installed, kernels_of
from ..engine.kernels import Kernels
from ..engine.state import Settings
from ..errors import BackendNotFoundError


def enter(owner: object, settings: Settings) -> bool:
    """Enter a region on this thread, with its kernels in place; the answer is that of the state machine."""
    recorded = state.machine.enter(owner, settings)
    try:
        if fast_path(settings) not in fully_installed:
            put_in_place(settings)
    except BaseException:
        state.machine.leave(owner)
        raise
    return recorded


def has_more_than_torch(settings: Settings) -> bool:
    """Say whether a region has what is no part of torch's autocast state: policies, or a cache."""
    return settings.override is not None or settings.cache is not None


def fast_path(settings: Settings) -> object:
    """Return what leaves nothing to entering but state, as long as it is fully installed; None where nothing does."""
    if settings.override is not None:
        return settings.override.served_by.get(settings.device_type)
    return settings.device_type if settings.cache is None else None


def put_in_place(settings: Settings) -> Kernels | None:
    """Put in place what a region that has just been entered needs.

    Returns:
        The kernels. Another entry with the same settings needs nothing put in place while they are fully installed.
    """
    kernels = None
    try:
        if settings.enabled or settings.override:
            kernels = kernels_of(settings.device_type, settings.override or ())
        if settings.override or settings.cache is not None:
            tell_policies_apart(settings.device_type)
        if has_more_than_torch(settings):
            for put in also_put_in_place:
                put()
    except BackendNotFoundError:
        if not settings.exact:  # a snapshot's may be of a region of torch's, for what no backend serves
            raise
    if settings.override and kernels is not None:
        settings.override.served_by[settings.device_type] = kernels
    return kernels
