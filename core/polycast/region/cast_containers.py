"""Mutable containers whose items are casts during a call, or copies of them for the call."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.compiler import is_dynamo_compiling

from ..common.atfork import fork_safe_lock

_Change = tuple[Any, Any, Any]
"""A key of a container, its item, and the replacement."""


class ByIdentity:
    """A mapping by identity: ``==`` of tensors compares elements, and containers have no hash.

    Dynamo would guard ``id(object)`` on the object, so traced code compares the objects instead.
    """

    __slots__ = ("_is_traced", "_pairs")

    def __init__(self) -> None:
        self._is_traced = is_dynamo_compiling()
        self._pairs: dict[int, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return len(self._pairs) > 0  # Dynamo of torch 2.11 does not trace bool() of a dict

    def add(self, key: Any, value: Any) -> None:
        """Add an entry, which also holds the key; keep the first of a key."""
        self._pairs.setdefault(len(self._pairs) if self._is_traced else id(key), (key, value))

    def get(self, key: Any) -> Any:
        """Return the value of a key, or None."""
        if self._is_traced:
            for each, value in self._pairs.values():
                if each is key:
                    return value
            return None
        found = self._pairs.get(id(key))
        return None if found is None else found[1]

    def items(self) -> Iterable[tuple[Any, Any]]:
        """Return the keys with their values."""
        return self._pairs.values()


class CastInPlace:
    """A mutable container whose items are casts during a call.

    Attributes:
        passed: what the call gets in place of the container.
        items: the items before the call, each with its key or position.
    """

    def __init__(self, container: Any) -> None:
        self.passed = self._container = container
        self.items: list[tuple[Any, Any]] = []
        self._users: _Users | None = None

    def begin(self) -> None:
        """Register this call as a user of the container."""
        if not is_dynamo_compiling():  # Dynamo traces one call, and applies its net effect to the container
            with _lock:
                self._users = _in_use.setdefault(id(self._container), _Users(self._container, set(), ByIdentity()))
                self._users.calls.add(id(self))
        self.items = _items(self._container)

    def put(self, changes: list[_Change]) -> None:
        """Put casts into the container; if it is frozen, as an immutable_list of torch.fx, give the call a copy."""
        try:
            if self._users is None:
                _replace(self._container, changes)
            else:
                with _lock:
                    _replace(self._container, changes)
        except Exception:  # frozen classes raise different errors
            self.passed = _copied(self._container, changes)

    def end(self, originals: ByIdentity) -> None:
        """Remove the casts, if this is the last call that uses the container."""
        if self._users is None:
            _take_out(self._container, originals)
            return
        with _lock:
            for cast, original in originals.items():
                self._users.originals.add(cast, original)
            self._users.calls.discard(id(self))
            if not self._users.calls:
                _in_use.pop(id(self._container), None)
                _take_out(self._container, self._users.originals)


class _Users(NamedTuple):
    """The calls that use a container with casts in it, nested or in several threads.

    If each removed its casts, a call in another thread would find tensors uncast.
    """

    container: Any  # held, because `_in_use` knows it by its id
    calls: set[int]
    originals: ByIdentity


_in_use: dict[int, _Users] = {}
"""By ``id(container)``, its users."""
_lock = fork_safe_lock()


class CastCopy:
    """A copy of a mutable container, if it has items to cast; with the attributes of :class:`CastInPlace`."""

    def __init__(self, container: Any) -> None:
        self.passed = self._container = container
        self.items: list[tuple[Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Read the items of the container."""
        self.items = _items(self._container)

    def put(self, changes: list[_Change]) -> None:
        """Give the call a copy with casts."""
        self.passed = _copied(self._container, changes)
        self._before = _items(self.passed)

    def end(self, originals: ByIdentity) -> None:
        """Apply the changes of the copy to the container."""
        if self.passed is self._container:
            return
        now = _items(self.passed)
        if _are_same(now, self._before):
            return
        items = [(key, _original(item, originals)) for key, item in now]
        if isinstance(self._container, list):
            self._container[:] = [item for _, item in items]
        elif isinstance(self._container, set):
            self._container.clear()
            self._container.update(item for _, item in items)
        else:
            for key in [key for key in self._container if key not in self.passed]:
                del self._container[key]
            self._container.update(items)


def rebuilt(value: Any, items: list[Any]) -> Any:
    """Return a tuple or frozenset with other items; the same one if its items are the same."""
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _items(container: Any) -> list[tuple[Any, Any]]:
    """Return the items of a mutable container, each with its key or position."""
    return list(container.items()) if isinstance(container, Mapping) else list(enumerate(container))


def _are_same(items: list[tuple[Any, Any]], others: list[tuple[Any, Any]]) -> bool:
    return len(items) == len(others) and all(
        item is other and (key is other_key or (type(key) is type(other_key) is int and key == other_key))
        for (key, item), (other_key, other) in zip(items, others, strict=True)
    )


def _replace(container: Any, changes: list[_Change]) -> None:
    """Replace items of a mutable container that are still there."""
    for key, item, replacement in changes:
        if isinstance(container, set):
            container.discard(item)
            container.add(replacement)
        elif container[key] is item:
            container[key] = replacement


def _copied(container: Any, changes: list[_Change]) -> Any:
    """Return a copy of a mutable container with some items replaced."""
    replaced = {key: replacement for key, _, replacement in changes}
    items = {key: replaced.get(key, item) for key, item in _items(container)}
    if not isinstance(container, Mapping):
        return type(container)(items.values())
    copied: Any = copy.copy(container)  # it may have attributes, as outputs of transformers have
    try:
        copied.update(items)
    except Exception:  # the copy is frozen, too
        return items
    if any(container[key] is not item for key, item, _ in changes):  # the copy shares its items with the container
        _replace(container, [(key, container[key], item) for key, item, _ in changes])
        return items
    return copied


def _take_out(container: Any, originals: ByIdentity) -> None:
    """Replace the casts in a mutable container by their originals."""
    if originals:
        changes = [(key, item, _original(item, originals)) for key, item in _items(container)]
        _replace(container, [change for change in changes if change[1] is not change[2]])


def _original(item: Any, originals: ByIdentity) -> Any:
    """Return the original of a cast, or of a tuple with casts; other items themselves."""
    original = originals.get(item)
    if original is not None:
        return original
    return rebuilt(item, [_original(each, originals) for each in item]) if isinstance(item, tuple) else item
