"""Regions that are left when the code in them is suspended, and entered again when it resumes."""

from collections.abc import Collection
from contextlib import nullcontext

import torch

from ..engine import state
from ..engine.disable_dynamo import disable_dynamo
from ..engine.state import Settings
from . import switched_off
from .entry import enter


class Suspendable:
    """Regions that are entered for each step of a generator, and left after it.

    Leaving also suspends the regions entered since, such as a ``with`` block that the generator's body is in. The next
    step enters them again, with the state that they had reached, on whatever thread it runs.

    Args:
        regions: what to enter.
        off_by_rule: the devices that a module rule has switched autocast off for; None: those on the entering thread.
    """

    def __init__(self, *regions: Settings, off_by_rule: Collection[str] | None = None) -> None:
        self._off_by_rule = off_by_rule
        self._own = len(regions)
        self._owner = object()  # not self, which would be in a cycle with what it suspends
        self._suspended: list[tuple[object, Settings]] = [(self._owner, settings) for settings in regions]

    @disable_dynamo
    def __enter__(self) -> None:
        entered = []
        try:
            for owner, settings in self._suspended:
                enter(owner, settings)
                entered.append(owner)
        except BaseException:
            for owner in reversed(entered):
                state.machine.leave(owner)
            raise
        off = self._off_by_rule
        self._rules = nullcontext() if off is None else switched_off.for_devices(off)
        self._rules.__enter__()

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        self._rules.__exit__(None, None, None)
        self._suspended = []
        left = 0
        while left < self._own:
            last = state.machine.last()
            assert last is not None  # a region of ours is left
            owner, settings = last
            reached = settings._replace(
                enabled=torch.is_autocast_enabled(settings.device_type),
                dtype=torch.get_autocast_dtype(settings.device_type),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            self._suspended.insert(0, (owner, reached))
            state.machine.leave(owner)
            left += owner is self._owner
