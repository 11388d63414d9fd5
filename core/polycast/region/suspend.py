"""Regions that are entered together: for a block, or for each step of code that is suspended between the steps."""

from collections.abc import Callable, Collection, Iterable

import torch

from ..compilers.export import record_entry, record_exit
from ..engine import state
from ..engine.disable_dynamo import disable_dynamo
from ..engine.state import Settings
from . import switched_off
from .entry import enter


class Regions:
    """Regions that are entered for a block, and left after it. Regions that the block leaves open stay open.

    Args:
        regions: what to enter.
        around: returns other regions to enter around these, whenever they are entered.
        off_by_rule: the devices that a module rule has switched autocast off for; None: those on the entering thread.
    """

    def __init__(
        self,
        *regions: Settings,
        around: Callable[[], Iterable[Settings]] | None = None,
        off_by_rule: Collection[str] | None = None,
    ) -> None:
        self._around = around
        self._off_by_rule = off_by_rule
        self._count = len(regions)
        self._owner, self._owner_around = object(), object()  # not self, in a cycle with what it suspends
        self._to_enter: list[tuple[object, Settings]] = [(self._owner, settings) for settings in regions]
        """These regions, and then those to enter inside."""
        self._entered: list[object] = []
        """The owners of these regions and those around them."""

    @disable_dynamo
    def __enter__(self) -> None:
        own = self._to_enter[: self._count]
        if self._around is not None:
            own = [*((self._owner_around, settings) for settings in self._around()), *own]
        rules_before = switched_off.current()
        entered: list[object] = []
        try:
            _enter_all(own, entered)
            if self._off_by_rule is not None:  # before the regions inside, where these do not count
                switched_off.set_devices(self._off_by_rule)
            if len(self._to_enter) > self._count:
                _enter_all(self._to_enter[self._count :], entered)
        except BaseException:
            switched_off.leave(rules_before)
            for owner in reversed(entered):
                _leave(owner)
            raise
        self._rules_before = rules_before
        self._entered = entered[: len(own)]

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        switched_off.leave(self._rules_before)
        for owner in reversed(self._entered):
            _leave(owner)


class Suspendable(Regions):
    """Regions that are entered for each step of a generator, and left after it.

    Leaving also suspends the regions entered since, such as a ``with`` block that the generator's body is in. The next
    step enters them again, with the state that they had reached, on whatever thread it runs.
    """

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        switched_off.leave(self._rules_before)
        suspended: list[tuple[object, Settings]] = []
        left = 0
        # If none was entered, the thread was in no region, so all that it is in are the body's.
        while (last := state.machine.last()) is not None and (left < len(self._entered) or not self._entered):
            owner, settings = last
            is_around = owner is self._owner_around
            if not is_around:
                reached = settings._replace(
                    enabled=torch.is_autocast_enabled(settings.device_type),
                    dtype=torch.get_autocast_dtype(settings.device_type),
                    cache_enabled=torch.is_autocast_cache_enabled(),
                )
                suspended.append((owner, reached))
            _leave(owner)
            left += is_around or owner is self._owner
        self._to_enter = suspended[::-1]


def _enter_all(regions: Iterable[tuple[object, Settings]], entered: list[object]) -> None:
    for owner, settings in regions:
        in_function_mode = enter(owner, settings)
        if in_function_mode:
            try:
                record_entry(settings)
            except BaseException:
                state.machine.leave(owner)
                raise
        entered.append(owner)


def _leave(owner: object) -> None:
    if state.machine.leave(owner):
        record_exit()
