"""What recipes computed and what they declined, counted."""

import threading
from collections import Counter
from collections.abc import Iterable

from .records import LowBit


class LowBitCounts:
    """Counts of one observation, each thread's its own: what another thread adds to is in no count of this one's."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str, str, str, str], int] = {}

    def note(self, device_type: str, recipe: str, op: str, reason: str | None) -> None:
        """Count a call."""
        key = threading.get_ident(), device_type, recipe, op, reason or ""
        self._counts[key] = self._counts.get(key, 0) + 1

    def records(self) -> tuple[LowBit, ...]:
        """Return the counts so far, those of most calls first."""
        together: Counter[tuple[str, str, str, str]] = Counter()
        for (_, *key), calls in self._counts.copy().items():
            device, recipe, op, reason = key
            together[device, recipe, op, reason] += calls
        return tuple(LowBit(*key, calls=calls) for key, calls in together.most_common())


def low_bit_lines(records: Iterable[LowBit]) -> Iterable[str]:
    """Yield what recipes computed and declined, for people."""
    for record in records:
        op = record.op.removeprefix("aten::")
        if record.declined:
            yield f"{record.recipe} on {record.device}: {op} declined {record.calls:,} times: {record.declined}"
        else:
            yield f"{record.recipe} on {record.device}: {op} computed {record.calls:,} times"
