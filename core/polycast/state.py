"""The state machine: for this thread and each device type, is autocast enabled, in which dtype, how deeply nested.

The truth for ``enabled`` and ``dtype`` is the dispatcher's thread-local state, because that is what the kernels obey;
so torch.autocast and polycast see one state. What is added here are frames: for each region that the thread is in, what
was there before it. Frames are a list for the thread, and a chain for each device in it, so that entering, leaving and
looking up the innermost region of a device cost the same at any depth.
"""

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .policy import CastPolicy
from .weights import RegionCache

Overlay: TypeAlias = Mapping[str, CastPolicy]


@dataclass(frozen=True)
class Settings:
    """What a region sets. `cache_enabled` and `overlay` of None leave what is there."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool | None = None
    overlay: Overlay | None = None


@dataclass(slots=True, eq=False)
class Frame:
    """One region that the thread is in: who entered it, what was there before, and the region of the device below."""

    owner: object
    device_type: str
    enabled_before: bool
    dtype_before: torch.dtype
    cache_enabled_before: bool
    overlay: Overlay | None
    below: "Frame | None"
    depth: int


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.innermost: dict[str, Frame] = {}
        self.cache = RegionCache()
        self.dtype_chosen: set[str] = set()


_thread = _Thread()


def enter(owner: object, settings: Settings) -> Frame:
    """Enter a region on this thread; `owner` is what :func:`leave` will be called with."""
    device_type = settings.device_type
    below = _thread.innermost.get(device_type)
    inherited = below.overlay if below is not None else None
    frame = Frame(
        owner,
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        inherited if settings.overlay is None else {**(inherited or {}), **settings.overlay},
        below,
        1 if below is None else below.depth + 1,
    )
    _thread.frames.append(frame)
    _thread.innermost[device_type] = frame
    torch.autocast_increment_nesting()
    torch.set_autocast_enabled(device_type, settings.enabled)
    torch.set_autocast_dtype(device_type, settings.dtype)
    if settings.cache_enabled is not None:
        torch.set_autocast_cache_enabled(settings.cache_enabled)
    return frame


def leave(owner: object) -> None:
    """Leave the innermost region that `owner` entered on this thread.

    Raises:
        RuntimeError: it entered none on this thread; nothing changes.
    """
    for frame in reversed(_thread.frames):
        if frame.owner is owner:
            return _unlink(frame)
    raise RuntimeError(
        f"{owner!r} cannot be left on thread {threading.current_thread().name!r}, which has not entered it. "
        "A region is left on the thread that entered it; polycast.capture() takes regions to another thread."
    )


def _unlink(frame: Frame) -> None:
    """Take a frame out; what it would have restored passes to the frame above it, or is restored if there is none."""
    above = _frames_from(frame)[1:]
    del _thread.frames[len(_thread.frames) - len(above) - 1]
    if above:
        above[0].cache_enabled_before = frame.cache_enabled_before
    else:
        torch.set_autocast_cache_enabled(frame.cache_enabled_before)
    same_device = [other for other in above if other.device_type == frame.device_type]
    if same_device:
        same_device[0].enabled_before = frame.enabled_before
        same_device[0].dtype_before = frame.dtype_before
        same_device[0].below = frame.below
        for other in same_device:
            other.depth -= 1
    else:
        torch.set_autocast_enabled(frame.device_type, frame.enabled_before)
        torch.set_autocast_dtype(frame.device_type, frame.dtype_before)
        if frame.below is None:
            del _thread.innermost[frame.device_type]
        else:
            _thread.innermost[frame.device_type] = frame.below
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    if not _thread.frames:
        _thread.cache.clear()


def _frames_from(frame: Frame) -> list[Frame]:
    """Return `frame` and those entered after it, in their order."""
    frames = _thread.frames
    for position in range(len(frames) - 1, -1, -1):
        if frames[position] is frame:
            return frames[position:]
    raise AssertionError("the frame is not on this thread")


class Suspendable:
    """Regions that are entered and left again and again, as the steps of a generator are run.

    Leaving takes out what was entered since, too: a ``with`` block that the generator's body is suspended in is put
    aside, with the state it had reached, and is in force again when the next step begins, on whatever thread.
    """

    def __init__(self, *regions: Settings) -> None:
        self._aside: list[tuple[object, Settings]] = [(self, settings) for settings in regions]
        self._base: Frame | None = None

    def __enter__(self) -> None:
        frames = [enter(owner, settings) for owner, settings in self._aside]
        self._base = frames[0] if frames else None

    def __exit__(self, *_: object) -> None:
        if self._base is None:
            return
        self._aside = []
        for frame in reversed(_frames_from(self._base)):
            reached = Settings(
                frame.device_type,
                torch.is_autocast_enabled(frame.device_type),
                torch.get_autocast_dtype(frame.device_type),
                torch.is_autocast_cache_enabled(),
                frame.overlay,
            )
            self._aside.insert(0, (frame.owner, reached))
            _unlink(frame)


def innermost(device_type: str) -> Frame | None:
    """Return the frame of the innermost region that this thread is in for a device."""
    return _thread.innermost.get(device_type)


def region_cache() -> RegionCache:
    """Return the cache of this thread's regions."""
    return _thread.cache


def nesting(device_type: str) -> int:
    """Return how many regions for a device this thread is in."""
    frame = _thread.innermost.get(device_type)
    return 0 if frame is None else frame.depth


def choose_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Set this thread's fast dtype for a device."""
    _thread.dtype_chosen.add(device_type)
    torch.set_autocast_dtype(device_type, dtype)


def current_dtype(device_type: str, default: torch.dtype) -> torch.dtype:
    """Return this thread's fast dtype for a device.

    A thread begins with torch's dtype for the device. The first look from outside a region sets it to `default`, the
    backend's, unless another was set; from then on the dispatcher's state is what counts, here as everywhere.
    """
    if (
        device_type not in _thread.dtype_chosen
        and device_type not in _thread.innermost
        and not torch.is_autocast_enabled(device_type)
    ):
        _thread.dtype_chosen.add(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        if dtype is not default and dtype is _initial_dtype(device_type):
            torch.set_autocast_dtype(device_type, default)
    return torch.get_autocast_dtype(device_type)


@functools.cache
def _initial_dtype(device_type: str) -> torch.dtype:
    """Return torch's dtype for a device in a thread that has set nothing, which only a fresh thread can tell."""
    found: list[torch.dtype] = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_autocast_dtype(device_type)))
    fresh.start()
    fresh.join()
    return found[0]
