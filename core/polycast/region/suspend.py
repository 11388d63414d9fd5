"""Regions that are left when the code in them is suspended, and entered again when it resumes."""

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, nullcontext

import torch

from ..compilers.export import record_entry, record_exit
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
        around: returns other regions to enter at each step, around these.
        off_by_rule: the devices that a module rule has switched autocast off for; None: those on the entering thread.
    """

    def __init__(
        self,
        *regions: Settings,
        around: Callable[[], Iterable[Settings]] = tuple,
        off_by_rule: Collection[str] | None = None,
    ) -> None:
        self._around = around
        self._off_by_rule = off_by_rule
        self._own = len(regions)
        self._owner, self._owner_around = object(), object()  # not self, in a cycle with what it suspends
        self._suspended: list[tuple[object, Settings]] = [(self._owner, settings) for settings in regions]
        self._entered = 0

    @disable_dynamo
    def __enter__(self) -> None:
        own = [(self._owner_around, settings) for settings in self._around()] + self._suspended[: self._own]
        off = self._off_by_rule
        rules = nullcontext() if off is None else switched_off.for_devices(off)
        entered: list[object] = []
        try:
            _enter_all(own, entered)
            with ExitStack() as stack:
                stack.enter_context(rules)  # before the regions of the body, where these do not count
                _enter_all(self._suspended[self._own :], entered)
                self._rules = stack.pop_all()
        except BaseException:
            for owner in reversed(entered):
                _leave(owner)
            raise
        self._entered = len(own)

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        self._rules.close()
        self._suspended = []
        left = 0
        while (last := state.machine.last()) is not None and (left < self._entered or not self._entered):
            owner, settings = last
            is_around = owner is self._owner_around
            if not is_around:
                reached = settings._replace(
                    enabled=torch.is_autocast_enabled(settings.device_type),
                    dtype=torch.get_autocast_dtype(settings.device_type),
                    cache_enabled=torch.is_autocast_cache_enabled(),
                )
                self._suspended.insert(0, (owner, reached))
            _leave(owner)
            left += is_around or owner is self._owner


def _enter_all(regions: Iterable[tuple[object, Settings]], entered: list[object]) -> None:
    for owner, settings in regions:
        in_function_mode = enter(owner, settings)
        entered.append(owner)
        if in_function_mode:
            record_entry(settings)


def _leave(owner: object) -> None:
    if state.machine.leave(owner):
        record_exit()
