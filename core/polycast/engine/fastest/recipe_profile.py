"""Find the profile of a recipe `Fastest`."""

import functools
import os

from ...policy.recipe import Fastest
from ...profiling.device_profile import DeviceProfile
from ...profiling.profile import find, profile


def with_profile(recipe: Fastest, device_type: str, *, measure: bool) -> Fastest:
    """Return a recipe whose profile is that of this machine, or in a file, with the profile itself.

    Regions with the result compute in the same ways, and compiled code for one serves the others, whichever process and
    machine they are on.

    Args:
        recipe: as the user gave it.
        device_type: of the region.
        measure: whether to measure the device if it has no profile; if not, the recipe is returned as it is.

    Raises:
        ValueError: the profile is of another device type; or its file cannot be read, or is not a profile.
        Exception: the device cannot be measured.
    """
    if recipe.profile is None:
        found = profile(device_type) if measure else find(device_type)
    elif isinstance(recipe.profile, str):
        found = _loaded(recipe.profile, _status(recipe.profile))
    else:
        found = recipe.profile
    if not isinstance(found, DeviceProfile):
        return recipe
    if found.device_type != device_type:
        raise ValueError(f"{recipe!r} has a profile of {found.device_type}, and the region is for {device_type}")
    return recipe if found is recipe.profile else _with(recipe, found)


@functools.lru_cache(maxsize=64)
def _with(recipe: Fastest, found: DeviceProfile) -> Fastest:
    return recipe.with_options(profile=found)


@functools.lru_cache(maxsize=64)
def _loaded(path: str, status: tuple[int, ...]) -> DeviceProfile:
    return DeviceProfile.load(path)


def _status(path: str) -> tuple[int, ...]:
    """Return what changes when a file is written; () for a file that cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
