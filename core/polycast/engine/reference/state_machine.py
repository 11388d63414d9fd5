"""The state machine in Python: the one to read."""

import threading
import weakref

import torch

from ...policy.cast_policy import CastPolicy
from ..state import Overlay, Settings
from ..weight_cache import WeightCache
from .store import PythonStore


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

    def policy(self, name: str, device_type: str, default: CastPolicy | None) -> CastPolicy | None:
        """Return the policy of an op in this thread's region."""
        region = self.innermost(device_type)
        overlay = None if region is None else region[0]
        return default if overlay is None else overlay.get(name, default)

    def store(self, device_type: str) -> PythonStore | None:
        """Return where this thread's region keeps casts; None where it is in none."""
        region = self.innermost(device_type)
        if region is None:
            return None
        return self._regions.store if region[1] is None else region[1].store("reference", PythonStore)
