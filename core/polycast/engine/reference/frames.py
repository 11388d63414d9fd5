"""The regions that a thread is in, as frames, and the kernels that it runs."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from ..state import Settings
from .store import PythonStore


class Frame:
    """An open region of a thread: its owner, the state before it, and its neighbours.

    `older` and `newer` are its neighbours among the thread's regions, `below` and `above` among those for the device;
    `earlier` is the owner's previous open region, and `kernel` the innermost kernel that ran at entry.
    """

    def __init__(self, owner: object, settings: Settings, below: "Frame | None", kernel: "NoAutocast | None") -> None:
        self.owner = owner
        self.settings = settings
        self.device_type = settings.device_type
        self.enabled_before = torch.is_autocast_enabled(settings.device_type)
        self.dtype_before = torch.get_autocast_dtype(settings.device_type)
        self.cache_enabled_before = torch.is_autocast_cache_enabled()
        self.override = settings.override
        self.cache = settings.cache
        self.older: Frame | None = None
        self.newer: Frame | None = None
        self.earlier: Frame | None = None
        self.below = below
        self.above: Frame | None = None
        self.kernel = kernel
        if below is not None and not settings.absolute:
            self.override = below.override if self.override is None else self.override.over(below.override)
            self.cache = below.cache if self.cache is None else self.cache


class ThreadRegions:
    """The regions of one thread.

    Any call may raise, even of a builtin: RecursionError, or what a signal handler raises. So all calls come before
    the first change, and :meth:`push` makes the calls that :meth:`remove` does: a region that could be entered can be
    left.
    """

    def __init__(self) -> None:
        self.newest: Frame | None = None
        self.innermost: dict[str, Frame] = {}
        self.depth: dict[str, int] = {}
        self.kernel: NoAutocast | None = None
        """The innermost kernel that runs on the thread."""
        self.changes = 0
        """The number of regions that the thread has entered and left."""
        self.store = PythonStore(of_region=True)
        self._by_owner: dict[int, Frame] = {}

    def push(self, frame: Frame) -> None:
        """Push a frame."""
        key = id(frame.owner)
        frame.earlier = self._by_owner.get(key)
        depth = self.depth.get(frame.device_type, 0)

        frame.older, self.newest = self.newest, frame
        if frame.older is not None:
            frame.older.newer = frame
        if frame.below is not None:
            frame.below.above = frame
        self.innermost[frame.device_type] = frame
        self.depth[frame.device_type] = depth + 1
        self.changes += 1
        self._by_owner[key] = frame

    def remove(self, owner: object) -> Frame | None:
        """Remove the innermost frame of an owner, and return it; None if there is none."""
        key = id(owner)
        frame = self._by_owner.get(key)
        if frame is None:
            return None

        if frame.earlier is not None:
            self._by_owner[key] = frame.earlier
        else:
            del self._by_owner[key]
        if frame.older is not None:
            frame.older.newer = frame.newer
        if frame.newer is not None:
            frame.newer.older = frame.older
        else:
            self.newest = frame.older
        if frame.below is not None:
            frame.below.above = frame.above
        if frame.above is not None:
            frame.above.below = frame.below
        elif frame.below is not None:
            self.innermost[frame.device_type] = frame.below
        else:
            del self.innermost[frame.device_type]
        self.depth[frame.device_type] -= 1
        self.changes += 1
        return frame

    def pass_on(self, left: Frame) -> None:
        """Pass the state before a frame to what is above it for its device: to kernels, and to the next frame.

        Restore it if there is no such frame; but within the outermost kernel of the device that is above, autocast
        stays off.
        """
        above = left.above
        kernel = first = self.kernel if above is None else above.kernel
        of_device = None
        while kernel is not None and kernel is not left.kernel:
            of_device = kernel if kernel.device_type == left.device_type else of_device
            kernel = kernel.outer
        kernel = first if of_device is None else of_device
        while kernel is not None and kernel is not left.kernel:
            kernel.enabled_after[left.device_type] = left.enabled_before
            kernel = kernel.outer
        if above is not None:
            above.dtype_before = left.dtype_before
            if of_device is None:
                above.enabled_before = left.enabled_before
        else:
            torch.set_autocast_dtype(left.device_type, left.dtype_before)
            if of_device is None:
                torch.set_autocast_enabled(left.device_type, left.enabled_before)

    def runs_kernel(self, device_type: str) -> bool:
        """Return whether a kernel of a device runs."""
        kernel = self.kernel
        while kernel is not None and kernel.device_type != device_type:
            kernel = kernel.outer
        return kernel is not None


class NoAutocast:
    """Keeps autocast off for a device while a kernel runs, and restores it afterwards.

    A kernel may run Python: a backend's, a dispatch mode's or the garbage collector's, which may leave regions around
    the kernel, or leave one open. So for all devices, a kernel counts as a frame: it holds the state to restore, and
    passes it to a frame above it.

    Args:
        regions: those of the thread.
        device_type: the device.
        exclusion: a context manager that keeps autocast off.

    Attributes:
        outer: the kernel around this one.
        enabled_after: by device, whether autocast is on after the kernel, if a region beneath it was left.
    """

    def __init__(self, regions: ThreadRegions, device_type: str, exclusion: AbstractContextManager[Any]) -> None:
        self._regions = regions
        self.device_type = device_type
        self._exclusion = exclusion
        self.outer: NoAutocast | None = None
        self._changes = 0
        self.enabled_after: dict[str, bool] = {}

    def __enter__(self) -> None:
        regions = self._regions
        self.outer, regions.kernel, self._changes = regions.kernel, self, regions.changes
        try:
            self._exclusion.__enter__()
        except BaseException:
            regions.kernel = self.outer
            raise

    def __exit__(self, *error: Any) -> None:
        regions = self._regions
        try:
            self._exclusion.__exit__(*error)  # in later torch than 2.11, it restores the keys of all devices
            while self._changes != regions.changes:  # Python may run here, and leave regions
                self._changes = regions.changes
                self._restore_after_changes()
        finally:
            regions.kernel = self.outer

    def _restore_after_changes(self) -> None:
        """Restore the state. Python may run in each call, and leave regions: then this runs again."""
        after, self.enabled_after = self.enabled_after, {}
        for device_type, enabled in after.items():
            torch.set_autocast_enabled(device_type, enabled)
        left_open = {}
        for device_type, innermost in tuple(self._regions.innermost.items()):
            enabled = torch.is_autocast_enabled(device_type)
            is_restored = device_type in after or device_type == self.device_type
            frame: Frame | None = innermost
            while frame is not None and frame.kernel is self:
                frame.kernel = self.outer
                left_open[device_type] = innermost
                if is_restored and (frame.below is None or frame.below.kernel is not self):
                    frame.enabled_before = enabled
                frame = frame.below
        for device_type, innermost in left_open.items():
            if self._regions.innermost.get(device_type) is innermost:
                torch.set_autocast_enabled(device_type, innermost.settings.enabled)
