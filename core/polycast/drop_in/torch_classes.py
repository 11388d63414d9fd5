"""What torch's autocast classes have while torch is patched: what they make turns into what stands in for it.

The classes stay what all their names mean, so that code that asks for them, torch.compile and torch.jit among it, finds
what it knows. An instance of one turns into an instance of a subclass. What is subclassed is that one too.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from ..compilers.torch_autocast import TorchAutocast
from ..compilers.torchscript import ScriptedAsTorch
from ..engine.disable_dynamo import disable_dynamo
from ..region.autocast import autocast
from ..torch_internals import changes
from .stand_in import StandIn, stand_ins, torchs_methods

_set_bases = vars(type)["__bases__"].__set__  # the metaclass of a class may have something else in its place


def attributes(theirs: type) -> dict[str, Any]:
    """Return what a class of torch's has while torch is patched, by the names of the attributes."""
    own = _METHODS if theirs is TorchAutocast else {}
    return {**own, "__init_subclass__": _init_subclass(theirs, _stand_in_of(theirs))}


def _stand_in_of(theirs: type) -> type[StandIn]:
    """Return what stands in for a class; make it for a deprecated one, which is torch.autocast for one device."""
    if theirs not in stand_ins:
        body = {"_jit_override_qualname": ScriptedAsTorch(), "__module__": theirs.__module__}
        made = type(theirs.__name__, (StandIn,), body)
        # torch's comes first: its __init__ knows the device and the defaults. As a base from the beginning it would
        # warn of a subclass of a deprecated class.
        _set_bases(made, (theirs, StandIn))
        stand_ins[theirs] = made
    return stand_ins[theirs]


@disable_dynamo
@functools.wraps(torchs_methods["__init__"])
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    ours = stand_ins.get(type(self))
    if ours is not None and changes.is_made(changes.PATCH_TORCH):  # else another's patch calls what was left below it
        self.__class__ = ours
    _method_of(self, "__init__")(self, *args, **kwargs)


def _on_either(name: str) -> Callable[..., Any]:
    """Return a method of torch's class, for code that calls it by the class's name with a region of either kind."""

    @disable_dynamo
    @functools.wraps(torchs_methods[name])  # torch.jit finds torch's source by this
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _method_of(self, name)(self, *args, **kwargs)

    return method


def _method_of(region: TorchAutocast, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = vars(StandIn)[name] if isinstance(region, StandIn) else torchs_methods[name]
    return method


_METHODS = {"__init__": _init, "__enter__": _on_either("__enter__"), "__exit__": _on_either("__exit__")}


def _init_subclass(theirs: type[Any], ours: type[StandIn]) -> Any:
    """Return the hook that has a new subclass of torch's class be one of what stands in for it.

    torch.jit compiles what a class has under its own name, so not this.
    """
    deprecation = vars(theirs).get("__deprecated__")

    def adopt(cls: Any, /, **options: Any) -> None:
        if not issubclass(cls, autocast):
            _set_bases(cls, tuple(ours if base is theirs else base for base in cls.__bases__))
        if deprecation is not None:
            warnings.warn(deprecation, FutureWarning, stacklevel=2)
        super(theirs, cls).__init_subclass__(**options)

    return classmethod(adopt)
