"""A mark in the autocast state that tells which policies are in force, for those who look at that state alone.

Dynamo guards compiled code on torch's autocast state, and AOTAutograd's cache on disk is keyed by it: which devices are
enabled, and with which dtypes. Policies that a region lays over the table are not part of that state, so code compiled
without them would run with them. While such a region is open, devices that can have no tensor in this process are
enabled with dtypes that stand for the policies. Nothing is cast for them, and ops cost no more.
"""

import functools
import hashlib

import torch

from ..engine.state import Settings
from ..plugins.registry import registry

_meanings: dict[tuple[torch.dtype, ...], str] = {}


def guard_regions(settings: Settings) -> tuple[Settings, ...]:
    """Return the regions to be entered after one that has a policy, and left before it: none if it has none.

    Raises:
        RuntimeError: other policies have the same mark, by a chance of one to a hundred thousand.
    """
    overlay = settings.overlay
    if overlay is None or not _devices():
        return ()
    enclosing = [str(torch.get_autocast_dtype(name)) for name in _devices() if torch.is_autocast_enabled(name)]
    place = f"mark {settings.device_type} {enclosing}"
    found: tuple[Settings, ...] | None = overlay.derived.get(place)
    if found is None:
        policies = sorted((op, policy.name) for op, policy in overlay.items())
        found = overlay.derived[place] = _mark(f"{place} {policies}")
    return found


def guard_region_count(settings: Settings) -> int:
    """Return how many regions :func:`guard_regions` has for settings."""
    return 0 if settings.overlay is None else len(_devices())


def _mark(meaning: str) -> tuple[Settings, ...]:
    number = int.from_bytes(hashlib.sha256(meaning.encode()).digest(), "big")
    digits = []
    for _ in _devices():
        number, digit = divmod(number, len(_dtypes()))
        digits.append(_dtypes()[digit])
    if _meanings.setdefault(tuple(digits), meaning) != meaning:
        raise RuntimeError("policy= has the mark of other policies in this process: add an op to it, or take one out")
    return tuple(Settings(name, True, dtype, exact=True) for name, dtype in zip(_devices(), digits, strict=True))


@functools.cache
def _devices() -> tuple[str, ...]:
    """Return some devices for which there is neither a backend nor a kernel to make a tensor with.

    They are chosen once, so that a region leaves as many as it entered.
    """
    known = registry.offered()
    candidates = [
        name
        for name in torch._C._autocast_supported_devices()
        if name not in known
        and name != torch._C._get_privateuse1_backend_name()  # which may yet be given another name
        and not torch._C._dispatch_has_kernel_for_dispatch_key(
            "aten::empty.memory_format", torch._C._dispatch_key_for_device(name)
        )
    ]
    return tuple(candidates[:4])


@functools.cache
def _dtypes() -> tuple[torch.dtype, ...]:
    found = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return tuple(found[name] for name in sorted(found))
