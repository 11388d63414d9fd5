"""What stands in for torch's autocast while torch is patched: polycast's, and torch's own for what no backend serves.

torch's own code meets these regions too. So they are instances of torch's class as well as of polycast's, and have what
torch reads off its own.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.amp import autocast_mode
from typing_extensions import Self

from ..compilers.export import record_entry
from ..compilers.torch_autocast import TorchAutocast
from ..compilers.torchscript import ScriptedAsTorch
from ..engine.disable_dynamo import disable_dynamo
from ..engine.state import Settings
from ..errors import BackendNotFoundError
from ..plugins.registry import is_autocast_available, registry
from ..region import custom_function
from ..region.autocast import autocast
from ..region.entry import enter

_F = TypeVar("_F", bound=Callable[..., Any])

_torch_functions = {
    name: getattr(autocast_mode, name)
    for name in ("autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available")
}

on_entry: Callable[[Settings], Settings] = lambda settings: settings  # noqa: E731
"""What a region sets, given what it would set; `polycast run` counts regions here, and gives them a cache."""


def _has_backend(device_type: object) -> bool:
    try:
        registry.find(device_type)
    except BackendNotFoundError:
        return False
    return True


torchs_methods: dict[str, Callable[..., Any]] = {
    name: vars(TorchAutocast)[name] for name in ("__init__", "__enter__", "__exit__")
}
"""Those that torch's class has for its own regions."""


class StandIn(autocast):
    """See :class:`polycast.autocast` and :class:`torch.autocast`, whose arguments it takes."""

    _jit_override_qualname = ScriptedAsTorch()
    _enabled = True  # these two are set as torch's regions set them
    _cache_enabled = True

    @disable_dynamo
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if not _has_backend(device_type):
            torchs_methods["__init__"](self, device_type, dtype, enabled, cache_enabled)
            return
        autocast.__init__(self, device_type, dtype, enabled, cache_enabled)
        self._enabled = self._settings.enabled
        self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled

    @property
    def is_torchs(self) -> bool:
        """Whether no backend serves the device, so that the region is torch's own."""
        return "_settings" not in vars(self)

    @disable_dynamo
    def __enter__(self) -> Self:
        if self.is_torchs:
            torchs_methods["__enter__"](self)
        elif enter(self, on_entry(self._settings)):
            record_entry(self._settings._replace(cache_enabled=self._cache_enabled))
        return self

    @disable_dynamo
    def __exit__(self, *exc_info: Any) -> None:
        if self.is_torchs:
            torchs_methods["__exit__"](self, *exc_info)
        else:
            autocast.__exit__(self, *exc_info)

    def __call__(self, func: _F) -> _F:
        """Return `func` wrapped so that its body runs in the region."""
        return autocast_decorator(self, func)

    def _steps(self) -> list[Settings]:
        return [on_entry(self._settings)]

    def __repr__(self) -> str:
        return (TorchAutocast if self.is_torchs else autocast).__repr__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self) not in stand_ins.values():
            return object.__new__, (type(self),), vars(self)
        # By torch's class: where torch is not patched it is a region of torch's.
        cache_enabled = self._cache_enabled if self.is_torchs else self._settings.cache_enabled
        return TorchAutocast, (self.device, self.fast_dtype, self._enabled, cache_enabled)


StandIn.__name__ = StandIn.__qualname__ = "autocast"
StandIn.__module__ = autocast_mode.__name__

stand_ins: dict[type, type[StandIn]] = {TorchAutocast: StandIn}
"""For torch's class, and each deprecated one that is torch's for one device, what its instances turn into."""


def autocast_decorator(autocast_instance: Any, func: _F) -> _F:
    """As :func:`polycast.autocast_decorator`; for a region of torch's, what torch does."""
    if isinstance(autocast_instance, autocast) and not getattr(autocast_instance, "is_torchs", False):
        return autocast.__call__(autocast_instance, func)
    decorated: _F = _torch_functions["autocast_decorator"](autocast_instance, func)
    return decorated


def _by_device(ours: Callable[..., Any]) -> Callable[..., Any]:
    theirs = _torch_functions[ours.__name__]

    @functools.wraps(theirs)
    def either(*args: Any, device_type: str, **options: Any) -> Any:
        return (ours if _has_backend(device_type) else theirs)(*args, device_type=device_type, **options)

    return either


def _is_autocast_available(device_type: str) -> bool:
    """As :func:`polycast.is_autocast_available`; for a device that no backend serves, what torch says.

    torch's own modules mean something else by it, whether there is an Autocast key, and get torch's answer: a graph of
    torch.utils.checkpoint may be made with torch patched and be run backward when it is not.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.partition(".")[0] == "torch" or not _has_backend(device_type):
        answer: bool = _torch_functions["is_autocast_available"](device_type)
        return answer
    return is_autocast_available(device_type)


FUNCTIONS: dict[Any, Any] = {
    _torch_functions["autocast_decorator"]: autocast_decorator,
    _torch_functions["custom_bwd"]: _by_device(custom_function.custom_bwd),
    _torch_functions["custom_fwd"]: _by_device(custom_function.custom_fwd),
    _torch_functions["is_autocast_available"]: _is_autocast_available,
}
"""For each function of torch's, what stands in for it."""
