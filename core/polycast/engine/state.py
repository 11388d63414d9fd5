"""The state machine: for this thread and each device type, is autocast enabled, in which dtype, how deeply nested.

The truth for ``enabled`` and ``dtype`` is the dispatcher's thread-local state, because that is what the kernels obey;
so torch.autocast and polycast see one state. What is added here are frames: for each region that the thread is in, what
was there before it. Frames are a list for the thread, and a chain for each device in it, so that entering, leaving and
looking up the innermost region of a device cost the same at any depth.

Entering and leaving is on the path of every region, so each engine has the machine in its own language:
reference/state_machine.py is the one to read, native/regions.h the other.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from ..common.cached_property import cached_property
from ..policy.cast_policy import CastPolicy
from ..policy.recipe import Recipe
from .casts.weight_cache import WeightCache
from .disable_dynamo import disable_dynamo


class Origin(NamedTuple):
    """Who asks for the policies of an override: the kind of rule, and the name that it has, if any."""

    rule: str
    name: str = ""


REGIONS_POLICY = Origin("region's policy")
MODULE_RULE = Origin("module rule")


class Override(dict[str, CastPolicy]):
    """The policies and the recipe that a region lays over the backend's table, and who asks for them.

    An op that has a policy here is not computed by the recipe, whoever asks for either.
    """

    def __init__(
        self,
        policies: Mapping[str, CastPolicy],
        origin: Origin = REGIONS_POLICY,
        layers: "tuple[Override, ...]" = (),
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(policies)
        self.origin = origin
        self.recipe = recipe
        self._layers = layers
        self.derived: dict[Any, Any] = {}
        """What others have made of it, each under a key that has its type: names of devices may be any."""
        self.served_by: dict[str, object] = {}
        """By device type, the kernels with which a region with this override has all that it needs put in place."""
        self._merged: tuple[Override, Override] | None = None

    @property
    def layers(self) -> "tuple[Override, ...]":
        """The overrides that this one is laid together of, each of one origin, the innermost first."""
        return self._layers or (self,)

    def decided_by(self, op: str) -> Origin | None:
        """Return who asks for the policy that an op has here, if it has one."""
        return next((layer.origin for layer in self.layers if op in layer), None)

    def __bool__(self) -> bool:
        return len(self) > 0 or self.recipe is not None

    @cached_property
    def low_bit(self) -> frozenset[str]:
        """The ops that the recipe is for, by their names in the dispatcher."""
        return frozenset() if self.recipe is None else self.recipe.overloads - self.keys()

    @disable_dynamo
    def over(self, below: "Override | None") -> "Override":
        """Return this override laid over that of an enclosing region; the last answer is kept."""
        if below is None:
            return self
        merged = self._merged
        if merged is None or merged[0] is not below:
            merged = self._merged = (below, self._laid_over(below))
        return merged[1]

    def _laid_over(self, below: "Override") -> "Override":
        others = [layer for layer in below.layers if all(layer is not mine for mine in self.layers)]
        # A function that is decorated with policies and recurs lays the same over themselves, at every depth.
        same_recipe = self.recipe in (None, below.recipe)
        if len(others) < len(below.layers) and below.items() >= self.items() and same_recipe:
            return below
        # Rules for modules are laid over what regions inside the modules ask for.
        layers = sorted((*self.layers, *others), key=lambda layer: layer.origin.rule != MODULE_RULE.rule)
        policies = {op: policy for layer in reversed(layers) for op, policy in layer.items()}
        recipe = next((layer.recipe for layer in layers if layer.recipe is not None), None)
        return Override(policies, self.origin, tuple(layers), recipe)

    @cached_property
    def text(self) -> str:
        """The policies and the recipe as text: the same for equal ones, in every process."""
        policies = ", ".join(f"{op}={policy.name}" for op, policy in sorted(self.items()))
        return f"({policies})" + ("" if self.recipe is None else self.recipe.text)

    @classmethod
    def of_text(cls, text: str, origin: Origin = REGIONS_POLICY) -> "Override":
        """Return the override that has a text."""
        policies, _, recipe = text[1:].partition(")")
        entries = (entry.rpartition("=") for entry in policies.split(", ") if entry)
        return cls(
            {op: CastPolicy[policy] for op, _, policy in entries},
            origin,
            recipe=Recipe.of_text(recipe) if recipe else None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Override, (dict(self), self.origin, self._layers, self.recipe)


WATCHED = "something records, transforms or watches the ops"
NO_WEIGHT = (
    "its weight is no parameter that can be kept, or a plain view of one (a subclass, or the result of another op)"
)
VIEWS_ARE_FULL = "what is kept of other views of its weight takes as much memory as the weight"
NOTHING_KEPT = "nothing is kept of weights here (cache_enabled=False, or a device's graph is being captured)"
WRITTEN_UNSEEN = (
    "something else holds the weight's memory and may write it unseen (an alias made through .data, an array, a buffer "
    "that it is a part of, another process)"
)
NO_ROOM = "the WeightCache has no room for its packed weight within max_bytes"
NOT_PACKED = (WATCHED, NO_WEIGHT, NOTHING_KEPT, WRITTEN_UNSEEN, NO_ROOM, VIEWS_ARE_FULL)
"""Why nothing is kept of a weight, by the numbers that the native engine has for it."""


class Settings(NamedTuple):
    """What a region sets. None leaves what is there; in an `exact` one, no override and no cache mean none.

    An override is laid over that of the enclosing region, unless the region is exact.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool | None = None
    override: Override | None = None
    cache: WeightCache | None = None
    exact: bool = False


class StateMachine(Protocol):
    """The regions of every thread."""

    def enter(self, owner: object, settings: Settings, /) -> bool:
        """Enter a region on this thread; `owner` is what :meth:`leave` will be called with.

        Say whether a mode for torch's functions is active, which may record what is entered and left.
        """

    def leave(self, owner: object, /) -> bool | None:
        """Leave the innermost region that `owner` entered on this thread: None if there is none, else as `enter`."""

    def last(self) -> tuple[object, Settings] | None:
        """Return owner and settings of the region that this thread entered last, if it is in one."""

    def open_regions(self, device_type: str, /) -> int:
        """Return how many regions for a device all threads together are in."""

    def innermost(self, device_type: str, /) -> tuple[Override | None, WeightCache | None] | None:
        """Return override and cache of the innermost region for a device, if this thread is in one."""

    def nesting(self, device_type: str, /) -> int:
        """Return how many regions for a device this thread is in."""

    def dtype(self, device_type: str, /) -> torch.dtype:
        """Return what ``torch.get_autocast_dtype`` does; every region without a dtype asks."""

    def excluded_keys(self) -> int:
        """Return the dispatch keys that this thread excludes: those of autocast, for the devices that it is off for."""

    def packing(
        self, cache: WeightCache, weight: torch.Tensor, kind: int, prepare: Callable[[torch.Tensor], Any], /
    ) -> tuple[torch.Tensor, ...] | str | None:
        """Return what a weight is packed into, kept in a cache by the rules of casts; `prepare` makes it.

        None where `prepare` has said so. Where nothing can be kept, nothing is made, and the answer is a text of
        NOT_PACKED that says why.
        """

    def clear_own_casts(self, all_threads: bool, /) -> None:
        """Drop the casts that this thread's own regions keep, or those of all threads' regions."""

    def region_methods(
        self,
        cls: type,
        fully_installed: set[object],
        complete_entry: Callable[[Any, bool], None],
        complete_exit: Callable[[Any, bool | None], None],
        /,
    ) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """Return ``__enter__`` and ``__exit__`` for the class of regions, where the engine has its own.

        A region has its settings as ``_settings``, and as ``_fast_path`` what leaves nothing to entering but state as
        long as it is in `fully_installed`. Where it is not, or :meth:`enter` has said yes, `complete_entry` does the
        rest; what it raises leaves the region. `complete_exit` is called where :meth:`leave` has not said no.
        """


machine: StateMachine
"""The machine of the engine that is in use; set by the package engine."""
when_used: list[Callable[[StateMachine], object]] = []
"""What is told of each machine that comes into use."""


def use(chosen: StateMachine) -> None:
    """Have regions entered and left through a machine, from now on."""
    global machine
    machine = chosen
    for tell in when_used:
        tell(chosen)


def not_entered(owner: object) -> RuntimeError:
    """Return what leaving raises on a thread where `owner` has entered nothing."""
    return RuntimeError(
        f"{owner!r} cannot be left on thread {threading.current_thread().name!r}, which has not entered it. "
        "A region is left on the thread that entered it; polycast.capture() takes regions to another thread."
    )


def current_dtype(device_type: str, default: torch.dtype) -> torch.dtype:
    """Return this thread's fast dtype for a device: what was set, in a region or by hand, and `default` until then.

    A thread begins with torch's dtype for the device, which need not be the backend's default. It counts as set where
    autocast is on, for then it is what the kernels obey.
    """
    dtype = machine.dtype(device_type)
    if (
        dtype is not default
        and dtype is _initial_dtype(device_type)
        and device_type not in _chosen.devices
        and machine.innermost(device_type) is None
        and not torch.is_autocast_enabled(device_type)
    ):
        return default
    return dtype


def choose_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Set this thread's fast dtype for a device; in a region, until it is left."""
    if machine.innermost(device_type) is None:
        _chosen.devices.add(device_type)
    torch.set_autocast_dtype(device_type, dtype)


class _Chosen(threading.local):
    def __init__(self) -> None:
        self.devices: set[str] = set()


_chosen = _Chosen()


@functools.cache
def _initial_dtype(device_type: str) -> torch.dtype:
    """Return torch's dtype for a device in a thread that has set nothing, which only a fresh thread can tell."""
    found: list[torch.dtype] = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_autocast_dtype(device_type)))
    fresh.start()
    fresh.join()
    return found[0]
