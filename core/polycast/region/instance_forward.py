"""The base class of callable objects that serve as the ``forward`` of a module, and are copied and pickled with it.

Others may wrap such a forward, and bind the result to the module, as Accelerate does. A copy of the module then has the
same function, bound to the copy, and pickling leaves the function out. So the module also keeps the object under
another name, where a copy finds its own.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeAlias

from torch import nn
from typing_extensions import Self

from . import cast_arguments

FORWARD = "forward"
_BOUND = "_polycast_bound"
"""An attribute of an unbound function: the forward that it belongs to."""
_IS_PUT = "is_put"
_REPLICATE = "_replicate_for_data_parallel"


class InstanceForward:
    """Serves as the ``forward`` of one module, and is copied and pickled with it. A subclass defines ``__call__``.

    Attributes:
        kept_as: the attribute of the module that holds it too, one for each subclass.
        module: the module.
        inner: the forward that the instance had before; None if it had none, and its class's is called.
        CastArguments: the casts of the arguments of one call, for a forward in another dtype.
    """

    kept_as: ClassVar[str]
    CastArguments: TypeAlias = cast_arguments.CastArguments

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = vars(module).get(FORWARD)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        raise NotImplementedError

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return a module's forward of this class, even if it was wrapped since; None if it has none."""
        forward = vars(module).get(FORWARD)
        while forward is not None:
            if isinstance(forward, cls):
                own = vars(module).get(cls.kept_as)
                return own if own is not None and own.module is module else None
            forward = getattr(forward, "__wrapped__", None) or getattr(forward, _BOUND, None)
        return None

    def put(self) -> None:
        """Install this object as the forward of the module."""
        self.module.forward = self
        vars(self.module).setdefault(_REPLICATE, _refuse_replicas)
        self._keep_before_forward()

    def take_out(self) -> None:
        """Restore the forward before, unless somebody has wrapped this one since."""
        attributes = vars(self.module)
        if attributes.get(FORWARD) is not self:
            return
        if self.inner is None:
            del attributes[FORWARD]
        else:
            attributes[FORWARD] = self.inner
        attributes.pop(self.kept_as, None)
        if attributes.get(_REPLICATE) is _refuse_replicas:
            del attributes[_REPLICATE]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), _IS_PUT: type(self).of(self.module) is self}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_put = state.pop(_IS_PUT)
        vars(self).update(state)
        if is_put and self.kept_as not in vars(self.module):  # it is a copy, whose attributes are not there yet
            self._keep_before_forward()

    def _keep_before_forward(self) -> None:
        """Put this object into the module twice, in the order in which it has to be unpickled.

        Pickle looks up a bound method, such as a wrapped forward, by name. It finds this object if that is in place.
        """
        attributes = vars(self.module)
        attributes.pop(FORWARD, None)
        attributes.update({self.kept_as: self, FORWARD: self})

    # The attributes of a bound method that others read.

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that is called, whose signature ``inspect`` reports."""
        return self.inner if self.inner is not None else type(self.module).forward.__get__(self.module)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The unbound function; with a copy of the module, it runs the copy's forward.

        It has no ``__wrapped__``, which Accelerate would follow to the function that it binds when it unwraps a model.
        """

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = self if module is self.module else getattr(module, self.kept_as, None)
            if own is None or own.module is not module:
                raise TypeError(
                    f"a forward under rules or settings of polycast was bound to a {type(module).__name__} that is no "
                    "deep copy of its module. Use copy.deepcopy."
                )
            return own(*args, **kwargs)

        vars(forward).update({"__signature__": inspect.signature(type(self.module).forward), _BOUND: self})
        return forward

    @property
    def __name__(self) -> str:
        return FORWARD


def _refuse_replicas() -> NoReturn:
    """Raise, in place of a module's ``_replicate_for_data_parallel``, which nn.DataParallel calls."""
    raise RuntimeError(
        "a model under the rules of polycast.apply_policy, or that an integration runs in regions, cannot be "
        "replicated by nn.DataParallel: replicas would call the original's forward. Use DistributedDataParallel (the "
        "Trainer does in processes of torchrun), or remove the rules before."
    )
