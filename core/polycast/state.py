"""The state machine: for this thread and each device type, is autocast enabled, in which dtype, how deeply nested.

The truth for ``enabled`` and ``dtype`` is the dispatcher's thread-local state, because that is what the kernels obey;
so torch.autocast and polycast see one state. What is added here are frames: for each region that the thread is in, what
was there before it. Frames are a list for the thread, and a chain for each device in it, so that entering, leaving and
looking up the innermost region of a device cost the same at any depth.

Entering and leaving is on the path of every region, so each engine has the machine in its own language:
:class:`PythonStateMachine` is the reference engine's, native.cpp has the other.
"""

import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from .policy import CastPolicy
from .weights import PythonStore, WeightCache


class Overlay(dict[str, CastPolicy]):
    """The policies that a region lays over the backend's table, and the forms that engines have made of them."""

    def __init__(self, policies: Mapping[str, CastPolicy]) -> None:
        super().__init__(policies)
        self.forms: dict[str, Any] = {}
        self._laid: tuple[Overlay, Overlay] | None = None

    def over(self, below: "Overlay | None") -> "Overlay":
        """Return this overlay laid over that of an enclosing region; the last answer is kept."""
        if below is None:
            return self
        laid = self._laid
        if laid is None or laid[0] is not below:
            laid = self._laid = (below, Overlay({**below, **self}))
        return laid[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Overlay, (dict(self),)


class Settings(NamedTuple):
    """What a region sets. None leaves what is there; in an `exact` one, no overlay and no cache mean none.

    An overlay is laid over that of the enclosing region, unless the region is exact.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool | None = None
    overlay: Overlay | None = None
    cache: WeightCache | None = None
    exact: bool = False


class StateMachine(Protocol):
    """The regions of every thread."""

    def enter(self, owner: object, settings: Settings, /) -> bool:
        """Enter a region on this thread; `owner` is what :meth:`leave` will be called with.

        Say whether a mode for torch's functions is active, which may record what is entered and left.
        """

    def leave(self, owner: object, /) -> bool | None:
        """Leave the innermost region that `owner` entered on this thread: None if there is none, else as `enter`."""

    def last(self) -> tuple[object, Settings] | None:
        """Return owner and settings of the region that this thread entered last, if it is in one."""

    def open_regions(self, device_type: str, /) -> int:
        """Return how many regions for a device all threads together are in."""

    def innermost(self, device_type: str, /) -> tuple[Overlay | None, WeightCache | None] | None:
        """Return overlay and cache of the innermost region for a device, if this thread is in one."""

    def nesting(self, device_type: str, /) -> int:
        """Return how many regions for a device this thread is in."""

    def dtype(self, device_type: str, /) -> torch.dtype:
        """Return what ``torch.get_autocast_dtype`` does; every region without a dtype asks."""

    def clear_own_casts(self) -> None:
        """Drop the casts that this thread's own regions keep, and the memory kept for the next ones."""


machine: StateMachine
"""The machine of the engine that is in use; set by the package engine."""


def use(chosen: StateMachine) -> None:
    """Have regions entered and left through a machine, from now on."""
    global machine
    machine = chosen


def not_entered(owner: object) -> RuntimeError:
    """Return what leaving raises on a thread where `owner` has entered nothing."""
    return RuntimeError(
        f"{owner!r} cannot be left on thread {threading.current_thread().name!r}, which has not entered it. "
        "A region is left on the thread that entered it; polycast.capture() takes regions to another thread."
    )


def current_dtype(device_type: str, default: torch.dtype) -> torch.dtype:
    """Return this thread's fast dtype for a device: what was set, in a region or by hand, and `default` until then.

    A thread begins with torch's dtype for the device, which need not be the backend's default. It counts as set where
    autocast is on, for then it is what the kernels obey.
    """
    dtype = machine.dtype(device_type)
    if (
        dtype is not default
        and dtype is _initial_dtype(device_type)
        and device_type not in _chosen.devices
        and machine.innermost(device_type) is None
        and not torch.is_autocast_enabled(device_type)
    ):
        return default
    return dtype


def choose_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Set this thread's fast dtype for a device; in a region, until it is left."""
    if machine.innermost(device_type) is None:
        _chosen.devices.add(device_type)
    torch.set_autocast_dtype(device_type, dtype)


class _Chosen(threading.local):
    def __init__(self) -> None:
        self.devices: set[str] = set()


_chosen = _Chosen()


@functools.cache
def _initial_dtype(device_type: str) -> torch.dtype:
    """Return torch's dtype for a device in a thread that has set nothing, which only a fresh thread can tell."""
    found: list[torch.dtype] = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_autocast_dtype(device_type)))
    fresh.start()
    fresh.join()
    return found[0]


class Frame:
    """One region that a thread is in: who entered it, what was there before, and the region of the device below."""

    def __init__(self, owner: object, settings: Settings, below: "Frame | None") -> None:
        self.owner = owner
        self.settings = settings
        self.device_type = settings.device_type
        self.enabled_before = torch.is_autocast_enabled(settings.device_type)
        self.dtype_before = torch.get_autocast_dtype(settings.device_type)
        self.cache_enabled_before = torch.is_autocast_cache_enabled()
        self.overlay = settings.overlay
        self.cache = settings.cache
        self.below = below
        self.depth = 1
        if below is not None:
            self.depth += below.depth
        if below is not None and not settings.exact:
            self.overlay = below.overlay if self.overlay is None else self.overlay.over(below.overlay)
            self.cache = below.cache if self.cache is None else self.cache


class _ThreadRegions:
    """The regions of one thread; they die with it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.innermost: dict[str, Frame] = {}
        self.store = PythonStore(own=True)


class _Regions(threading.local):
    def __init__(self, threads: "weakref.WeakSet[_ThreadRegions]") -> None:
        self.here = _ThreadRegions()
        threads.add(self.here)


class PythonStateMachine:
    """The state machine in Python."""

    def __init__(self) -> None:
        self._threads: weakref.WeakSet[_ThreadRegions] = weakref.WeakSet()
        self._local = _Regions(self._threads)

    @property
    def _regions(self) -> _ThreadRegions:
        return self._local.here

    def enter(self, owner: object, settings: Settings) -> bool:
        """See :class:`StateMachine`, as for the other methods."""
        regions = self._regions
        device_type = settings.device_type
        frame = Frame(owner, settings, regions.innermost.get(device_type))
        regions.frames.append(frame)
        regions.innermost[device_type] = frame
        torch.set_autocast_enabled(device_type, settings.enabled)
        torch.set_autocast_dtype(device_type, settings.dtype)
        if settings.cache_enabled is not None:
            torch.set_autocast_cache_enabled(settings.cache_enabled)
        torch.autocast_increment_nesting()
        return torch._C._is_torch_function_mode_enabled()

    def leave(self, owner: object) -> bool | None:
        """Take a frame out; what it would have restored passes to the frame above it, or is restored if none is."""
        regions = self._regions
        position = len(regions.frames) - 1
        while position >= 0 and regions.frames[position].owner is not owner:
            position -= 1
        if position < 0:
            return None
        frame = regions.frames.pop(position)
        above = regions.frames[position:]
        if above:
            above[0].cache_enabled_before = frame.cache_enabled_before
        else:
            torch.set_autocast_cache_enabled(frame.cache_enabled_before)
        self._leave_device(frame, [other for other in above if other.device_type == frame.device_type])
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        if not regions.frames:
            regions.store.clear()
        return torch._C._is_torch_function_mode_enabled()

    def _leave_device(self, frame: Frame, above: list[Frame]) -> None:
        if above:
            above[0].enabled_before = frame.enabled_before
            above[0].dtype_before = frame.dtype_before
            above[0].below = frame.below
            for other in above:
                other.depth -= 1
            return
        torch.set_autocast_enabled(frame.device_type, frame.enabled_before)
        torch.set_autocast_dtype(frame.device_type, frame.dtype_before)
        if frame.below is None:
            del self._regions.innermost[frame.device_type]
        else:
            self._regions.innermost[frame.device_type] = frame.below

    def last(self) -> tuple[object, Settings] | None:
        """Return what was entered last."""
        if not self._regions.frames:
            return None
        frame = self._regions.frames[-1]
        return frame.owner, frame.settings

    def open_regions(self, device_type: str) -> int:
        """Count the regions for a device, over all threads."""
        innermost = [regions.innermost.get(device_type) for regions in self._threads]
        return sum(frame.depth for frame in innermost if frame is not None)

    def innermost(self, device_type: str) -> tuple[Overlay | None, WeightCache | None] | None:
        """Return what the innermost region for a device has."""
        frame = self._regions.innermost.get(device_type)
        return None if frame is None else (frame.overlay, frame.cache)

    def nesting(self, device_type: str) -> int:
        """Count the regions for a device."""
        frame = self._regions.innermost.get(device_type)
        return 0 if frame is None else frame.depth

    def dtype(self, device_type: str) -> torch.dtype:
        """Return the fast dtype of a device on this thread."""
        return torch.get_autocast_dtype(device_type)

    def clear_own_casts(self) -> None:
        """Drop this thread's own casts."""
        self._regions.store.clear()

    def own_store(self) -> PythonStore:
        """Return where this thread's regions keep casts that were given no cache."""
        return self._regions.store
