"""The eviction policy of a store with max_bytes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..casts.cast_cache import EntryKind

Key: TypeAlias = tuple[int, EntryKind, tuple[Any, ...]]
"""The identity of a weight, the kind of the entry, and the layout of a view."""

_MAX_USES = 3
_USES_TO_REPACK = 16
"""The number of uses that save as much time as prepacking takes."""
_MAX_REFUSED = 10_000


class Usage(Protocol):
    """An entry of the store."""

    nbytes: int
    uses: int
    last_use: int


@dataclass(slots=True)
class _Refused:
    """An entry that had no room. A hint by identity: the weight may have died."""

    elements: int  # of the weight
    nbytes: int = 0  # of the entry; 0 if it was not made
    count: int = 0  # refusals since `since`, by the clock
    since: int = 0


class ByteBudget:
    """Decides which entries fit into `max_bytes`; None: all."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._refused: dict[Key, _Refused] = {}
        self._clock = 0

    def note_hit(self, entry: Usage) -> None:
        """Note that an entry is used."""
        entry.uses = min(entry.uses + 1, _MAX_USES)
        entry.last_use = self._tick()

    def note_insertion(self, key: Key, entry: Usage) -> None:
        """Note that an entry is added."""
        self._refused.pop(key, None)
        entry.last_use = self._tick()

    def note_refused_size(self, key: Key, elements: int, nbytes: int) -> None:
        """Remember the size of a prepacked weight that had no room."""
        self._refused_of(key, elements).nbytes = nbytes

    def prepacked_size(self, key: Key, elements: int) -> int:
        """Return the size that a prepacked weight would have: the known one if it was refused, else the least."""
        refused = self._refused.get(key)
        return max(elements, refused.nbytes if refused is not None and refused.elements == elements else 0)

    def is_exceeded(self, nbytes: int) -> bool:
        """Return whether so many bytes are too many."""
        return self._max_bytes is not None and nbytes > self._max_bytes

    def has_room(self, key: Key, elements: int, nbytes: int, held: int, entries: Iterable[tuple[Key, Usage]]) -> bool:
        """Return whether a new entry may be added, in place of the least recently used ones.

        An entry gives way if it was not used while the new one was refused as often as the entry had been used (16
        times where either is a prepacked weight). So a model that is larger than the store has hits on the part that
        fits: each entry is used again before a layer outside is needed again, and no layer evicts the one that is
        needed next. A model that is no longer used gives way.

        Args:
            key: of the new entry.
            elements: of its weight.
            nbytes: its size.
            held: the size of all entries.
            entries: all entries, least recently used first.
        """
        if self.is_exceeded(nbytes):
            return False
        for oldest_key, oldest in entries:
            if not self.is_exceeded(held + nbytes):
                break
            refused = self._refused_of(key, elements)
            if oldest.last_use > refused.since:
                refused.count, refused.since = 0, self._tick()
            is_prepacked = isinstance(key[1], int) or isinstance(oldest_key[1], int)
            if refused.count < (_USES_TO_REPACK if is_prepacked else oldest.uses):
                refused.count += 1
                return False
            held -= oldest.nbytes
        return True

    def _refused_of(self, key: Key, elements: int) -> _Refused:
        if len(self._refused) > _MAX_REFUSED:
            self._refused.clear()
        refused = self._refused.get(key)
        if refused is None or refused.elements != elements:  # of a former weight with this identity
            refused = self._refused[key] = _Refused(elements)
        return refused

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
