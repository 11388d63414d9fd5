"""Enter a region on this thread, with its kernels installed."""

from ..engine import state
from ..engine.installation import install_for
from ..engine.state import Settings
from ..torch_internals import changes


def enter(owner: object, settings: Settings) -> bool:
    """Enter a region on this thread, with its kernels installed; return what the state machine does."""
    in_function_mode = state.machine.enter(owner, settings)
    try:
        if settings.ready_key not in state.ready:
            prepare(settings)
    except BaseException:
        state.machine.leave(owner)
        raise
    return in_function_mode


def prepare(settings: Settings) -> None:
    """Install what a region needs that has just been entered."""
    install_for(settings)
    if settings.has_more_than_torch and not changes.overrides_are_guarded():
        from ..compilers import eager_fallback  # most regions have neither an override nor a cache

        eager_fallback.keep()
