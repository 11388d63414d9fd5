"""Regions that are left when the code in them is suspended, and entered again when it goes on."""

from collections.abc import Collection
from contextlib import nullcontext

import torch

from ..compilers.uncompiled import enters_regions
from ..engine import state
from ..engine.disable_dynamo import disable_dynamo
from ..engine.state import Settings
from . import switched_off
from .entry import enter


@enters_regions
class Suspendable:
    """Regions that are entered and left again and again, as the steps of a generator are run.

    Leaving takes out what was entered since, too: a ``with`` block that the generator's body is suspended in is put
    aside, with the state it had reached, and is in force again when the next step begins, on whatever thread.

    Args:
        regions: what to enter.
        off_by_rule: the devices that autocast is off for in them because of a rule for a module; None: those of where
            they are entered.
    """

    def __init__(self, *regions: Settings, off_by_rule: Collection[str] | None = None) -> None:
        self._off_by_rule = off_by_rule
        self._own = len(regions)
        self._owner = (
            object()
        )  # not this object, which would be among what it puts aside, and live until it is collected
        self._aside: list[tuple[object, Settings]] = [(self._owner, settings) for settings in regions]

    @disable_dynamo
    def __enter__(self) -> None:
        entered = []
        try:
            for owner, settings in self._aside:
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
        self._aside = []
        left = 0
        while left < self._own:
            last = state.machine.last()
            assert last is not None  # a region of ours is still to come
            owner, settings = last
            reached = settings._replace(
                enabled=torch.is_autocast_enabled(settings.device_type),
                dtype=torch.get_autocast_dtype(settings.device_type),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            self._aside.insert(0, (owner, reached))
            state.machine.leave(owner)
            left += owner is self._owner
