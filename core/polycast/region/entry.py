"""Entering a region on this thread, with its kernels in place."""

from ..compilers.guards import tell_policies_apart
from ..engine import state
from ..engine.installation import fully_installed, kernels_of
from ..engine.state import Settings
from ..errors import BackendNotFoundError
from .checkpoint import watch_checkpoints


def enter(owner: object, settings: Settings) -> bool:
    """Enter a region on this thread, with its kernels in place; the answer is that of the state machine."""
    recorded = state.machine.enter(owner, settings)
    if settings.device_type not in fully_installed or settings.overlay is not None:
        put_in_place(owner, settings)
    return recorded


def put_in_place(owner: object, settings: Settings) -> None:
    """Put in place what a region that `owner` has just entered needs; where that fails, the region is left."""
    try:
        if settings.enabled or settings.overlay:
            kernels_of(settings.device_type, settings.overlay or ())
        if settings.overlay:
            tell_policies_apart(settings.device_type)
            watch_checkpoints()
    except BackendNotFoundError:
        if not settings.exact:  # a snapshot's may be of a region of torch's, for what no backend serves
            state.machine.leave(owner)
            raise
    except BaseException:
        state.machine.leave(owner)
        raise
