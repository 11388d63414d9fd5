"""Entering a region on this thread, with its kernels in place."""

from ..compilers.guards import tell_policies_apart
from ..engine import state
from ..engine.installation import fully_installed, installed, kernels_of
from ..engine.state import Overlay, Settings
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
        if settings.overlay:
            _put_kernels_in_place(settings.device_type, settings.overlay)
            tell_policies_apart(settings.device_type)
            watch_checkpoints()
        elif settings.enabled:
            kernels_of(settings.device_type)
    except BackendNotFoundError:
        if not settings.exact:  # a snapshot's may be of a region of torch's, for what no backend serves
            state.machine.leave(owner)
            raise
    except BaseException:
        state.machine.leave(owner)
        raise


def _put_kernels_in_place(device_type: str, overlay: Overlay) -> None:
    """Put the kernels of an overlay's ops in place, looking at each op once for as long as the kernels stay there."""
    if device_type not in fully_installed or overlay.served_by.get(device_type) is not installed.get(device_type):
        overlay.served_by[device_type] = kernels_of(device_type, overlay)
