"""`cached_property`: as in functools, without a lock."""

from collections.abc import Callable
from typing import Generic, TypeVar, overload

from typing_extensions import Self

_Owner = TypeVar("_Owner")
_Value = TypeVar("_Value")


class cached_property(Generic[_Owner, _Value]):
    """A property that is computed once per instance; threads that compute it at once get the same value.

    Until Python 3.12, functools' takes a lock for all instances, which a forked child may wait for forever. From then
    on, threads may get different values.
    """

    def __init__(self, compute: Callable[[_Owner], _Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type[_Owner]) -> Self: ...

    @overload
    def __get__(self, instance: _Owner, owner: type[_Owner]) -> _Value: ...

    def __get__(self, instance: _Owner | None, owner: type[_Owner]) -> Self | _Value:
        if instance is None:
            return self
        value: _Value = vars(instance).setdefault(self._compute.__name__, self._compute(instance))
        return value
