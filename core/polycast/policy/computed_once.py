"""Attributes that are computed at their first use."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from typing_extensions import Self

_Owner = TypeVar("_Owner")
_Value = TypeVar("_Value")


class computed_once(Generic[_Owner, _Value]):
    """A property whose value is kept.

    That of functools has a lock until Python 3.12: one for all instances, which makes threads wait for each other, and
    which a child that is forked meanwhile waits for without an end. Here threads may compute a value twice, and get the
    same one.
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
        kept: dict[str, Any] = vars(instance)
        value: _Value = kept.setdefault(self._compute.__name__, self._compute(instance))
        return value
