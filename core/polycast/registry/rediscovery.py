"""Read the metadata of installed distributions again, and keep what they did not change."""

from .backend_loader import BackendLoader
from .extensions import DeviceExtensions
from .hookspecs import GENERIC
from .registry import Discovery


def changed_devices(old: Discovery, new: Discovery) -> list[str]:
    """Move what still holds from an old discovery to a new one, and return the devices in use for which it does not."""
    changed = set()
    for name, before in list(old.loaders.items()):  # another thread may look up a device
        if not before.is_used:
            continue
        is_generic = any(each.device_type == GENERIC for each in before.candidates)
        now = new.loader_of(name) if is_generic else new.loaders.get(name)
        if _offers(now) == _offers(before):
            new.loaders[name] = before
        else:
            changed.add(name)
            if before.by_hand is not None:
                new.loaders.setdefault(name, BackendLoader(name)).by_hand = before.by_hand
        extensions = old.extensions.get(name)
        if _offers(new.extensions.get(name)) != _offers(extensions):
            changed.add(name)
        elif extensions is not None:
            new.extensions[name] = extensions
    return sorted(changed)


def _offers(offered: BackendLoader | DeviceExtensions | None) -> tuple[object, ...]:
    """Return what decides which backend or extensions are loaded: variables, distributions and modules, in order."""
    named = [] if offered is None else [(each.distribution, each.entry_point.value) for each in offered.candidates]
    return (offered.blocked, offered.provider, named) if isinstance(offered, BackendLoader) else (False, None, named)
