"""The methods and functions that replace torch's while torch is patched.

Code that holds torch's class must see its regions change, so the class stays and three of its methods are replaced. A
device without a backend keeps torch's behavior, and so do the regions that compiled code enters.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.amp import autocast_mode
from torch.compiler import is_dynamo_compiling

from polycast import autocast, custom_bwd, custom_fwd, is_autocast_available
from polycast.errors import BackendNotFoundError
from polycast.plugin import (
    Feature,
    LibraryRegion,
    Patch,
    disable_dynamo,
    get_backend,
    hold_during_fork,
    torch_name,
)

_F = TypeVar("_F", bound=Callable[..., Any])
_REGION = "_polycast_region"
TorchAutocast = autocast_mode.autocast
_UnmanagedAutocast: type[Any] = torch_name(
    "torch.amp.autocast_mode._UnmanagedAutocast",
    type(None),
    "while torch is patched, the regions in graphs become polycast's",
    since=(2, 12),
)

_torch_methods = {name: vars(TorchAutocast)[name] for name in ("__init__", "__enter__", "__exit__")}
_torch_functions = {
    name: getattr(autocast_mode, name)
    for name in ("autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available")
}


class PatchedRegion(LibraryRegion):
    """A region that was made by one of torch's names."""

    replace: "ClassVar[Callable[[PatchedRegion], autocast] | None]" = None
    """Returns the region to enter in place of one, if ``polycast run`` runs the program."""

    _enabled = True  # attributes, as torch's regions have them
    _cache_enabled = True

    @disable_dynamo
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self._settings
        self._enabled = settings.enabled
        self._cache_enabled = (
            torch.is_autocast_cache_enabled() if settings.cache_enabled is None else settings.cache_enabled
        )

    def entered(self) -> autocast:
        """Return the region with what ``polycast run`` adds."""
        replace = type(self).replace
        return self if replace is None else replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through torch's class, so that unpickling gives torch's region where torch is not patched.
        arguments = self.device, self.fast_dtype, self._enabled, self._settings.cache_enabled
        own = {name: value for name, value in vars(self).items() if name not in _NOT_OWN}
        return TorchAutocast, arguments, own or None


_NOT_OWN = {"_settings", "_enabled", "_cache_enabled"}
"""The attributes of a region that the program has not set."""


def _region_of(instance: object) -> Any:
    """Return the polycast region of an instance of torch's class; None if the instance is torch's own region."""
    region: autocast | None = instance if isinstance(instance, autocast) else getattr(instance, _REGION, None)
    return region


def _follow(instance: Any, region: autocast) -> None:
    """Give the region of an instance of a subclass the device and the fast dtype that the program has set since."""
    region._set(instance.device, instance.fast_dtype)


_log = logging.getLogger("polycast.dropin")
_without_backend: set[str] = set()
"""The devices for which this was logged."""


def _has_backend(device_type: str) -> bool:
    try:
        get_backend(device_type)
    except BackendNotFoundError as error:
        if device_type not in _without_backend:
            _without_backend.add(device_type)
            _log.info("%s: regions stay torch's: %s", device_type, error)
        return False
    return True


@disable_dynamo
@functools.wraps(_torch_methods["__init__"])
def _init(
    self: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    if is_dynamo_compiling():  # of a subclass: Dynamo makes regions of torch's class itself
        torch._dynamo.graph_break("Dynamo does not trace the methods of torch.autocast, which its class inherits")
    if (
        isinstance(self, _UnmanagedAutocast)
        or not PATCH_TORCH.is_made()  # called by a wrapper that another library left on the class
        or not _has_backend(device_type)
    ):
        _torch_methods["__init__"](self, device_type, dtype, enabled, cache_enabled)
    elif type(self) is TorchAutocast:
        # Delegating to a region would not make this one an instance of polycast.autocast, as documented. Nor could it
        # be left by hand after the patch has ended, when torch's class has its own methods again.
        self.__class__ = PatchedRegion
        PatchedRegion.__init__(cast("PatchedRegion", self), device_type, dtype, enabled, cache_enabled)
    else:
        region = PatchedRegion(device_type, dtype, enabled, cache_enabled)
        self.device, self.fast_dtype = region.device, region.fast_dtype
        self._enabled, self._cache_enabled = region._enabled, region._cache_enabled
        setattr(self, _REGION, region)


@disable_dynamo
@functools.wraps(_torch_methods["__enter__"])
def _enter(self: Any) -> Any:
    region = _region_of(self)
    if region is None:
        return _torch_methods["__enter__"](self)
    if region is self:
        region.__enter__()
        return self
    _follow(self, region)
    _count_open(1)
    try:
        region.__enter__()
    except BaseException:
        _count_open(-1)
        raise
    return self


@disable_dynamo
@functools.wraps(_torch_methods["__exit__"])
def _exit(self: Any, *exc_info: Any) -> Any:
    region = _region_of(self)
    if region is None:
        return _torch_methods["__exit__"](self, *exc_info)
    if region is self:
        return region.__exit__(*exc_info)
    if region.leave():
        _count_open(-1)
    elif hasattr(self, "prev"):  # entered while torch was not patched
        return _torch_methods["__exit__"](self, *exc_info)
    else:
        region.__exit__(*exc_info)  # raises
    return None


_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_open = 0
"""The number of open regions of subclasses of torch's class, on all threads."""


def _count_open(change: int) -> None:
    global _open
    with _lock:
        _open += change
        restore_exit()


def restore_exit() -> None:
    """Restore torch's ``__exit__`` if torch is no longer patched and no region needs the replaced one."""
    with _lock:
        if not _open and not PATCH_TORCH.is_made():
            EXIT.undo()


METHODS = {"__init__": _init, "__enter__": _enter}
"""The replaced methods of torch's class. torch.jit finds torch's source through ``functools.wraps``."""


def autocast_decorator(autocast_instance: Any, func: _F) -> _F:
    """Return `func` wrapped so that its body runs in a region, of polycast's or of torch's."""
    region = _region_of(autocast_instance)
    if region is None:
        decorated: _F = _torch_functions["autocast_decorator"](autocast_instance, func)
        return decorated
    if region is autocast_instance:
        return autocast.__call__(region, func)
    steps: _F = region.decorate(func, autocast_instance, lambda: _follow(autocast_instance, region))
    return steps


def _by_device(ours: Callable[..., Any]) -> Callable[..., Any]:
    theirs = _torch_functions[ours.__name__]

    @functools.wraps(theirs)
    def either(*args: Any, device_type: str, **options: Any) -> Any:
        return (ours if _has_backend(device_type) else theirs)(*args, device_type=device_type, **options)

    return either


def _is_autocast_available(device_type: str) -> bool:
    """Return what :func:`polycast.is_autocast_available` does; for a device without a backend, what torch does.

    torch's own modules ask it whether there is an Autocast key, and get torch's answer: a graph of
    torch.utils.checkpoint may be made with torch patched and run backward without. So does compiled code.
    """
    if not is_dynamo_compiling():
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] != "torch" and _has_backend(device_type):
            return is_autocast_available(device_type)
    answer: bool = _torch_functions["is_autocast_available"](device_type)
    return answer


FUNCTIONS: dict[Any, Any] = {
    _torch_functions["autocast_decorator"]: autocast_decorator,
    _torch_functions["custom_bwd"]: _by_device(custom_bwd),
    _torch_functions["custom_fwd"]: _by_device(custom_fwd),
    _torch_functions["is_autocast_available"]: _is_autocast_available,
}
"""The replacement of each of torch's functions."""


def _replace_names(patch: Patch) -> None:
    """Replace methods of torch's class, and each public name of torch's functions."""
    for name, method in METHODS.items():
        patch.replace(TorchAutocast, name, method)
    replacements = {id(theirs): ours for theirs, ours in FUNCTIONS.items()}
    for module_name, module in list(sys.modules.items()):
        parts = module_name.split(".")
        if parts[0] != "torch" or any(part.startswith("_") for part in parts) or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements and not name.startswith("_"):
                patch.replace(module, name, replacements[id(value)])


def _replace_exit(patch: Patch) -> None:
    patch.replace(TorchAutocast, "__exit__", _exit)


_MODULE = autocast_mode.__name__
_NAMES = (*(f"{_MODULE}.autocast.{name}" for name in METHODS), *(f"torch.*.{name}" for name in _torch_functions))
PATCH_TORCH = Feature("patch_torch", "", ((_MODULE, _NAMES, _replace_names),), outlives_uninstall=True)
EXIT = Feature(  # lasts longer, until regions of subclasses that were entered while it was made are left
    "patched __exit__", "", ((_MODULE, (f"{_MODULE}.autocast.__exit__",), _replace_exit),), outlives_uninstall=True
)
