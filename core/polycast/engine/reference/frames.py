"""The regions that a thread is in, and the kernels that it runs, as frames."""

from typing import Any

import torch

from ..state import Settings


class Frame:
    """An open region of a thread, or a kernel that runs on it: its owner, and the state before it."""

    def __init__(self, owner: object, settings: Settings, below: "Frame | None", is_kernel: bool) -> None:
        self.owner = owner
        self.settings = settings
        self.is_kernel = is_kernel
        self.device_type = settings.device_type
        self.enabled_before = torch.is_autocast_enabled(settings.device_type)
        self.dtype_before = torch.get_autocast_dtype(settings.device_type)
        self.cache_enabled_before = torch.is_autocast_cache_enabled()
        self.override = settings.override
        self.cache = settings.cache
        if below is not None and not settings.absolute:
            self.override = below.override if self.override is None else self.override.over(below.override)
            self.cache = below.cache if self.cache is None else self.cache


class ThreadRegions:
    """The regions of one thread.

    Attributes:
        frames: its open regions and running kernels, the oldest first. It is replaced by one assignment, since any call
            may raise, even of a builtin: RecursionError, or what a signal handler raises. For the same reason, a region
            is entered and left with calls that are nested equally deep: one that could be entered can be left.
        histories: by identity and dtype, a weight, and a tensor without memory that has the history of its cast.
    """

    def __init__(self) -> None:
        self.frames: tuple[Frame, ...] = ()
        self.histories: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def last(self, device_type: str | None = None) -> Frame | None:
        """Return the region that was entered last, of all or of those for a device."""
        for frame in reversed(self.frames):
            if not frame.is_kernel and device_type in (None, frame.device_type):
                return frame
        return None

    def count(self, device_type: str, kernels: bool = False) -> int:
        """Return the number of open regions for a device, or of the kernels of it that run."""
        return sum(frame.is_kernel is kernels and frame.device_type == device_type for frame in self.frames)

    def push(self, owner: object, settings: Settings, is_kernel: bool = False) -> None:
        """Add a frame, and set the state of its device."""
        device_type = settings.device_type
        while True:
            frames = self.frames
            pushed = (*frames, Frame(owner, settings, self.last(device_type), is_kernel))
            if self.frames is frames:  # else the garbage collector has left a region meanwhile
                self.frames = pushed
                break
        torch.set_autocast_enabled(device_type, settings.enabled)
        torch.set_autocast_dtype(device_type, settings.dtype)

    def pop(self, owner: object) -> bool:
        """Remove the last frame of an owner, and return whether it had one.

        The state before it passes to the frame above it for its device; if there is none, it is restored.
        """
        while True:
            frames = self.frames
            place = len(frames) - 1
            while place >= 0 and frames[place].owner is not owner:
                place -= 1
            if place < 0:
                return False
            frame, newer = frames[place], frames[place + 1 :]
            above = None
            for each in newer:
                if each.device_type == frame.device_type:
                    above = each
                    break
            if above is not None:
                above.enabled_before, above.dtype_before = frame.enabled_before, frame.dtype_before
            else:
                torch.set_autocast_dtype(frame.device_type, frame.dtype_before)
                torch.set_autocast_enabled(frame.device_type, frame.enabled_before)
            if newer:
                newer[0].cache_enabled_before = frame.cache_enabled_before
            else:
                torch.set_autocast_cache_enabled(frame.cache_enabled_before)
            others = frames[:place] + newer
            if self.frames is frames:  # else the garbage collector has left a region, and changed this frame's state
                self.frames = others
                return True


class WithoutAutocast:
    """Keeps autocast off for a device while a kernel runs.

    A kernel may run Python: a backend's, a dispatch mode's or the garbage collector's, which may leave regions around
    the kernel, or leave one open. So a kernel has a frame. The dispatcher restores its keys where Python returns to it,
    so at its end a kernel switches autocast on and off again for the devices whose regions have changed.
    """

    def __init__(self, regions: ThreadRegions, device_type: str) -> None:
        self._regions = regions
        self._device_type = device_type

    def __enter__(self) -> None:
        settings = Settings(self._device_type, False, torch.get_autocast_dtype(self._device_type))
        self._before = self._regions.frames
        try:
            self._regions.push(self, settings, is_kernel=True)
        except BaseException:  # of a signal handler
            self._regions.pop(self)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._end()
        except BaseException:  # of a signal handler
            self._end()
            raise

    def _end(self) -> None:
        self._regions.pop(self)
        after = None
        while after is not self._regions.frames:  # the garbage collector may leave regions meanwhile
            after = self._regions.frames
            if after != self._before:
                self._set_enabled(after)

    def _set_enabled(self, after: tuple[Frame, ...]) -> None:
        for device_type in {frame.device_type for frame in (*self._before, *after)}:
            then, now = (
                [each for each in frames if each.device_type == device_type] for frames in (self._before, after)
            )
            if then[-1:] != now[-1:]:
                torch.set_autocast_enabled(device_type, now[-1].settings.enabled if now else then[0].enabled_before)
