"""The regions that a thread is in, as frames, and the kernels that it runs."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from ..state import Settings
from .store import PythonStore


class Frame:
    """An open region of a thread: its owner, the state before it, and the innermost kernel that ran at entry."""

    def __init__(self, owner: object, settings: Settings, below: "Frame | None", kernel: "NoAutocast | None") -> None:
        self.owner = owner
        self.settings = settings
        self.device_type = settings.device_type
        self.enabled_before = torch.is_autocast_enabled(settings.device_type)
        self.dtype_before = torch.get_autocast_dtype(settings.device_type)
        self.cache_enabled_before = torch.is_autocast_cache_enabled()
        self.override = settings.override
        self.cache = settings.cache
        self.kernel = kernel
        if below is not None and not settings.absolute:
            self.override = below.override if self.override is None else self.override.over(below.override)
            self.cache = below.cache if self.cache is None else self.cache


class ThreadRegions:
    """The regions of one thread.

    Attributes:
        frames: its open regions, the oldest first. It is replaced by one assignment, since any call may raise, even of
            a builtin: RecursionError, or what a signal handler raises. For the same reason, a region is entered and
            left with calls that are nested equally deep: one that could be entered can be left.
        kernel: the innermost kernel that runs on the thread.
        store: the casts of its regions.
    """

    def __init__(self) -> None:
        self.frames: tuple[Frame, ...] = ()
        self.kernel: NoAutocast | None = None
        self.store = PythonStore(of_region=True)

    def of(self, device_type: str) -> list[Frame]:
        """Return the open regions for a device, the oldest first."""
        return [frame for frame in self.frames if frame.device_type == device_type]

    def innermost(self, device_type: str) -> Frame | None:
        """Return the innermost region for a device."""
        for frame in reversed(self.frames):
            if frame.device_type == device_type:
                return frame
        return None

    def pass_on(self, left: Frame, above: Frame | None) -> None:
        """Pass the state before a frame to what is above it for its device: to kernels, and to the next frame.

        Restore it if there is no such frame; but within the outermost kernel of the device that is above, autocast
        stays off.
        """
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
        self._frames: tuple[Frame, ...] = ()
        self.enabled_after: dict[str, bool] = {}

    def __enter__(self) -> None:
        regions = self._regions
        self.outer, regions.kernel, self._frames = regions.kernel, self, regions.frames
        try:
            self._exclusion.__enter__()
        except BaseException:
            regions.kernel = self.outer
            raise

    def __exit__(self, *error: Any) -> None:
        regions = self._regions
        try:
            self._exclusion.__exit__(*error)  # in later torch than 2.11, it restores the keys of all devices
            while self._frames is not regions.frames:  # Python may run here, and leave regions
                self._frames = regions.frames
                self._restore_after_changes()
        finally:
            regions.kernel = self.outer

    def _restore_after_changes(self) -> None:
        """Restore the state. Python may run in each call, and leave regions: then this runs again."""
        after, self.enabled_after = self.enabled_after, {}
        for device_type, enabled in after.items():
            torch.set_autocast_enabled(device_type, enabled)
        left_open: dict[str, Frame] = {}
        for frame in self._frames:
            if frame.kernel is not self:
                continue
            frame.kernel = self.outer
            device_type = frame.device_type
            if device_type not in left_open and (device_type in after or device_type == self.device_type):
                frame.enabled_before = torch.is_autocast_enabled(device_type)
            left_open[device_type] = frame
        for device_type, innermost in left_open.items():
            if self._regions.innermost(device_type) is innermost:
                torch.set_autocast_enabled(device_type, innermost.settings.enabled)
