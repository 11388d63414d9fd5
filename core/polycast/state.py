"""The state machine: for this thread and each device type, is autocast enabled, in which dtype, how deeply nested.

The truth for ``enabled`` and ``dtype`` is the dispatcher's thread-local state, because that is what the kernels obey;
so torch.autocast and polycast see one state. What is added here are frames: for each region that the thread is in, what
was there before it. Frames are a list for the thread, and a chain for each device in it, so that entering, leaving and
looking up the innermost region of a device cost the same at any depth.

Frames belong to no engine. What an engine's kernels need to know of a region, they are given as it is entered and left.
"""

import functools
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from .backend import Backend
from .policy import CastPolicy
from .weights import CastStore, WeightCache


class Engine(Protocol):
    """What the state machine asks of an engine."""

    name: str

    def exchange(
        self,
        device_type: str,
        enabled: bool,
        dtype: torch.dtype,
        cache_enabled: bool | None,
        step: int,
        active: bool,
        overlay: Any,
        store: Any,
        /,
    ) -> tuple[bool, torch.dtype, bool]:
        """Write a device's state on this thread, and return what it was: enabled, dtype and whether casts are kept.

        `step` is 1 where a region is entered and -1 where one is left, `active` says whether the thread is then in a
        region for the device, and `overlay` and `store` are what :meth:`overlay` and :meth:`new_store` returned for it.
        """

    def overlay(self, policies: Mapping[str, CastPolicy]) -> Any:
        """Return the engine's form of the policies that a region lays over the table."""

    def new_store(self, own: bool, max_bytes: int | None = None, verify: bool = False) -> CastStore:
        """Return a store of casts, a thread's own or a user's."""

    def kernels(self, backend: Backend) -> Any:
        """Put a backend's kernels in place."""


class Overlay(dict[str, CastPolicy]):
    """The policies that a region lays over the backend's table, and the forms that engines have made of them."""

    def __init__(self, policies: Mapping[str, CastPolicy]) -> None:
        super().__init__(policies)
        self._forms: dict[str, Any] = {}

    def form(self, engine: Engine) -> Any:
        """Return an engine's form of this."""
        if engine.name not in self._forms:
            self._forms[engine.name] = engine.overlay(self)
        return self._forms[engine.name]


class Settings(NamedTuple):
    """What a region sets. None leaves what is there."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool | None = None
    overlay: Overlay | None = None
    cache: WeightCache | None = None


class Frame:
    """One region that the thread is in: who entered it, what was there before, and the region of the device below."""

    __slots__ = (
        "below",
        "cache",
        "cache_enabled_before",
        "depth",
        "device_type",
        "dtype_before",
        "enabled_before",
        "overlay",
        "owner",
    )

    def __init__(self, owner: object, settings: Settings, below: "Frame | None") -> None:
        self.owner = owner
        self.device_type = settings.device_type
        self.below = below
        self.overlay = settings.overlay
        self.cache = settings.cache
        self.depth = 1
        if below is not None:
            self.depth += below.depth
            if self.cache is None:
                self.cache = below.cache
            if self.overlay is None:
                self.overlay = below.overlay
            elif below.overlay is not None:
                self.overlay = Overlay({**below.overlay, **self.overlay})
        self.enabled_before: bool
        self.dtype_before: torch.dtype
        self.cache_enabled_before: bool


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.innermost: dict[str, Frame] = {}
        self.stores: dict[str, CastStore] = {}
        self.dtype_chosen: set[str] = set()


_thread = _Thread()
_engine: Engine


def use(engine: Engine) -> None:
    """Have regions be entered and left through an engine, from now on."""
    global _engine
    _engine = engine


def enter(owner: object, settings: Settings) -> Frame:
    """Enter a region on this thread; `owner` is what :func:`leave` will be called with."""
    device_type, enabled, dtype, cache_enabled, _, _ = settings
    thread = _thread
    frame = Frame(owner, settings, thread.innermost.get(device_type))
    frame.enabled_before, frame.dtype_before, frame.cache_enabled_before = _engine.exchange(
        device_type, enabled, dtype, cache_enabled, 1, True, _laid(frame), store_of(frame)
    )
    thread.frames.append(frame)
    thread.innermost[device_type] = frame
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
    thread = _thread
    if thread.frames[-1] is frame:
        thread.frames.pop()
        enabled, dtype = frame.enabled_before, frame.dtype_before
        cache_enabled: bool | None = frame.cache_enabled_before
        innermost = frame.below
    else:
        enabled, dtype, cache_enabled, innermost = _pass_on(frame)
    device_type = frame.device_type
    if innermost is None:
        del thread.innermost[device_type]
        _engine.exchange(device_type, enabled, dtype, cache_enabled, -1, False, None, None)
    else:
        thread.innermost[device_type] = innermost
        _engine.exchange(device_type, enabled, dtype, cache_enabled, -1, True, _laid(innermost), store_of(innermost))
    if not thread.frames:
        for store in thread.stores.values():
            store.end_region()


def _pass_on(frame: Frame) -> tuple[bool, torch.dtype, bool | None, Frame | None]:
    """Take out a frame that others are above; return what is then in force for its device, and the innermost frame."""
    thread = _thread
    above = frames_from(frame)[1:]
    del thread.frames[len(thread.frames) - len(above) - 1]
    above[0].cache_enabled_before = frame.cache_enabled_before
    same_device = [other for other in above if other.device_type == frame.device_type]
    if not same_device:
        return frame.enabled_before, frame.dtype_before, None, frame.below
    same_device[0].enabled_before = frame.enabled_before
    same_device[0].dtype_before = frame.dtype_before
    same_device[0].below = frame.below
    for other in same_device:
        other.depth -= 1
    enabled = torch.is_autocast_enabled(frame.device_type)
    return enabled, torch.get_autocast_dtype(frame.device_type), None, same_device[-1]


def frames_from(frame: Frame) -> list[Frame]:
    """Return a frame of this thread and those entered after it, in their order."""
    frames = _thread.frames
    position = len(frames) - 1
    while frames[position] is not frame:
        position -= 1
    return frames[position:]


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
        for frame in reversed(frames_from(self._base)):
            reached = Settings(
                frame.device_type,
                torch.is_autocast_enabled(frame.device_type),
                torch.get_autocast_dtype(frame.device_type),
                torch.is_autocast_cache_enabled(),
                frame.overlay,
                frame.cache,
            )
            self._aside.insert(0, (frame.owner, reached))
            _unlink(frame)


def innermost(device_type: str) -> Frame | None:
    """Return the frame of the innermost region that this thread is in for a device."""
    return _thread.innermost.get(device_type)


def store_of(frame: Frame) -> CastStore:
    """Return where a region keeps casts: in the cache it was given, or in this thread's own."""
    if frame.cache is not None:
        return frame.cache.store(_engine)
    stores = _thread.stores
    store = stores.get(_engine.name)
    if store is None:
        store = stores[_engine.name] = _engine.new_store(True)
    return store


def _laid(frame: Frame) -> Any:
    return None if frame.overlay is None else frame.overlay.form(_engine)


def clear_own_casts() -> None:
    """Drop the casts that this thread's own regions keep, and the memory kept for the next ones."""
    for store in _thread.stores.values():
        store.clear()


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
