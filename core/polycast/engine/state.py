"""The regions of each thread: what they set, how they nest, and the machine that enters and leaves them.

The truth for ``enabled`` and ``dtype`` is the dispatcher's thread-local state, which is what the kernels obey, so that
torch.autocast and polycast see one state. polycast adds frames: for each open region, the state before it. Frames form
a list for the thread, and a chain for each device in it, so entering, leaving and finding a device's innermost region
cost the same at any depth.

Each engine implements the machine in its own language, because every region runs it: reference/state_machine.py is the
one to read, native/regions.h the other.
"""

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

from ..common import generation
from ..common.atfork import fork_safe_lock
from .casts.cast_cache import CastCache
from .override import Override


class Settings(NamedTuple):
    """The settings of a region. None inherits from the enclosing region.

    The override is merged over that of the enclosing region. An absolute region inherits neither override nor cache.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool | None = None
    override: Override | None = None
    cache: CastCache | None = None
    absolute: bool = False

    @property
    def has_more_than_torch(self) -> bool:
        """Whether the region has an override or a cache, which torch's autocast state does not hold."""
        return self.override is not None or self.cache is not None

    @property
    def ready_key(self) -> object:
        """The key of the region, which is in :data:`ready` while everything that the region needs is installed.

        The device type or, for a region with an override or a cache, the kernels that were installed for it: None
        before its first entry.
        """
        if self.override is not None:
            return self.override.ready_key
        return self.device_type if self.cache is None else ready_with_cache.get(self.device_type)


class StateMachine(Hashable, Protocol):
    """The regions of every thread."""

    def enter(self, owner: object, settings: Settings, /) -> bool:
        """Enter a region on this thread; `owner` is what :meth:`leave` will be called with.

        Returns:
            Whether a torch function mode is active, which may record regions.
        """

    def leave(self, owner: object, /) -> bool | None:
        """Leave the innermost region that `owner` entered on this thread.

        Returns:
            As :meth:`enter`; None if `owner` has entered none.
        """

    def last(self) -> tuple[object, Settings] | None:
        """Return owner and settings of the region that this thread entered last, if it is in one."""

    def open_regions(self, device_type: str, /) -> int:
        """Return the number of open regions for a device, over all threads."""

    def runs_kernel(self, device_type: str, /) -> bool:
        """Return whether this thread runs a kernel of a device, which has called Python."""

    def innermost(self, device_type: str, /) -> tuple[Override | None, CastCache | None]:
        """Return override and cache of this thread's innermost region for a device; None for each that it lacks."""

    def nesting(self, device_type: str, /) -> int:
        """Return the number of this thread's regions for a device."""

    def dtype(self, device_type: str, /) -> torch.dtype:
        """Return what ``torch.get_autocast_dtype`` does; every region without a dtype asks."""

    def excluded_keys(self) -> int:
        """Return a number for the dispatch keys that this thread excludes, for use as a memo key.

        It changes when autocast is switched on or off for a device.
        """

    def prepacked(
        self, cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any], /
    ) -> tuple[torch.Tensor, ...] | str | None:
        """Return a prepacked weight, from a cache or made by `prepack` and, if the engine caches, cached.

        None if `prepack` returns None. If it cannot be cached it is not made, and the reason is returned, from
        NOT_PREPACKED.
        """

    def register_recipe_op(self, name: str, op: str, compute: Callable[..., torch.Tensor], /) -> None:
        """Register the engine's kernel, if it has one, of an operator that replaces an op in compiled code.

        Args:
            name, op: the operator and the op, by their names in the dispatcher.
            compute: the operator's Python function, for calls that the engine does not compute: see native/recipe_op.h.
        """

    def store(self, cache: CastCache, /) -> Any:
        """Return the store of a cache, of the native engine; None if the engine caches nothing."""

    def forget_actions(self) -> None:
        """Drop the actions that are kept for calls by a recipe, on all threads; see recipes/actions.py.

        Call it after a change of what they depend on. Installing the kernels of a device does the same.
        """

    def set_recomputing(self, backward: int | None, /) -> None:
        """Set the backward that recomputes a forward on this thread, by torch's number; None: none does."""

    def clear_own_casts(self, all_threads: bool, /) -> None:
        """Drop the casts that the regions of this thread, or of all threads, keep outside of a :class:`WeightCache`."""

    def region_methods(
        self,
        cls: type,
        ready: set[object],
        ready_with_cache: dict[str, object],
        init: Callable[..., None],
        resolve: Callable[..., tuple[Settings, bool]],
        generation: dict[str, Any],
        complete_entry: Callable[[Any, bool], None],
        complete_exit: Callable[[Any, bool | None], None],
        /,
    ) -> tuple[Callable[..., Any], ...] | None:
        """Return the engine's own ``__init__``, ``__enter__`` and ``__exit__`` for regions; None: those in Python.

        Args:
            cls: the class of regions.
            ready, ready_with_cache: see below.
            init: the ``__init__`` in Python.
            resolve: returns the settings for all arguments of ``__init__``, and whether the engine may keep them for
                equal arguments in this generation, on any thread with the same number of threads of torch and, for a
                region without dtype, the same fast dtype and a region around it if there is one here.
            generation: the names in common/generation.py.
            complete_entry: called with a region that has been entered, and what :meth:`enter` returned, if that is true
                or the region's key is not in `ready`. What it raises leaves the region.
            complete_exit: the same with what :meth:`leave` returned, if that is not False.
        """


ready: set[object] = set()
"""The device types for which every kernel is installed, and these kernels. A region whose key is in here sets state
and does nothing else on entry. The native engine holds this very set."""
ready_with_cache: dict[str, object] = {}
"""The keys in :data:`ready` of regions with a cache and without an override, by device type."""

machine: StateMachine
"""The state machine of the engine in use."""


_region_class: Any = None
_in_python: dict[str, Callable[..., Any]] = {}
"""The methods of the class of regions that engines may have their own of, by name."""


def set_state_machine(chosen: StateMachine) -> None:
    """Construct, enter and leave regions with a state machine from now on."""
    global machine
    machine = chosen
    cls = _region_class
    if cls is None:
        return
    methods = chosen.region_methods(
        cls,
        ready,
        ready_with_cache,
        _in_python["__init__"],
        cls._resolve,
        vars(generation),
        cls._complete_entry,
        cls._complete_exit,
    )
    for name, method in zip(_in_python, methods or _in_python.values(), strict=True):
        setattr(cls, name, method)


def set_region_class(cls: type) -> None:
    """Set the class of regions. Its objects have `_settings`; see `StateMachine.region_methods` for its methods."""
    global _region_class
    _in_python.update((name, getattr(cls, name)) for name in ("__init__", "__enter__", "__exit__"))
    _region_class = cls
    set_state_machine(machine)


_clearing = fork_safe_lock()


def clear_torchs_cache() -> None:
    """Clear torch's own cache of casts, but not during a fork: the child would find the cache's mutex held."""
    # Give up after 50 ms: another library's fork hook may wait for this thread. Then the child may find the mutex held.
    is_acquired = _clearing.acquire(timeout=0.05)
    try:
        torch.clear_autocast_cache()
    finally:
        if is_acquired:
            _clearing.release()


def not_entered(owner: object) -> RuntimeError:
    """Return the error for leaving a region on a thread where `owner` has entered none."""
    return RuntimeError(
        f"{owner!r} cannot be left on thread {threading.current_thread().name!r}, which has not entered it. "
        "A region is left on the thread that entered it; polycast.capture() takes regions to another thread."
    )


def current_dtype(device_type: str, default: torch.dtype) -> torch.dtype:
    """Return this thread's fast dtype for a device: the one set in a region or by hand; `default` if none was.

    A thread begins with torch's dtype for the device, which need not be the backend's default. While autocast is on,
    that dtype is returned even if nobody set it, because the kernels cast to it.
    """
    dtype = machine.dtype(device_type)
    if (
        dtype is not default
        and dtype is _initial_dtype(device_type)
        and device_type not in _chosen.devices
        and not machine.nesting(device_type)
        and not torch.is_autocast_enabled(device_type)
    ):
        return default
    return dtype


def choose_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Set this thread's fast dtype for a device; in a region, until it is left."""
    if not machine.nesting(device_type):
        _chosen.devices.add(device_type)
    torch.set_autocast_dtype(device_type, dtype)


class _Chosen(threading.local):
    def __init__(self) -> None:
        self.devices: set[str] = set()


_chosen = _Chosen()


@functools.cache
def _initial_dtype(device_type: str) -> torch.dtype:
    """Return torch's dtype for a device in a thread that has set none, which only a fresh thread can tell."""
    found: list[torch.dtype] = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_autocast_dtype(device_type)))
    fresh.start()
    fresh.join()
    return found[0]
