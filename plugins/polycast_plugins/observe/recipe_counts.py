"""Count the ops that recipes compute, and those for which they fall back to the fast dtype."""

import threading
from collections import Counter
from collections.abc import Iterable

from .records import LowBit
from .units import times_text


class RecipeCounts:
    """Counts of calls by thread, so that threads need no lock."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str, str, str, str, str], int] = {}

    def note(self, device_type: str, recipe: str, op: str, reason: str | None, package: str) -> None:
        """Count a call."""
        key = threading.get_ident(), device_type, recipe, op, reason or "", package
        self._counts[key] = self._counts.get(key, 0) + 1

    def records(self) -> tuple[LowBit, ...]:
        """Return the counts, the largest first."""
        total: Counter[tuple[str, str, str, str, str]] = Counter()
        for (_, *key), calls in self._counts.copy().items():
            device, recipe, op, reason, package = key
            total[device, recipe, op, reason, package] += calls
        return tuple(LowBit(*key[:4], calls=calls, package=key[4]) for key, calls in total.most_common())


def recipe_lines(records: Iterable[LowBit]) -> Iterable[str]:
    """Yield a line of text for each record."""
    for record in records:
        op = record.op.removeprefix("aten::")
        if record.declined:
            yield f"{record.recipe} on {record.device}: {op} declined {times_text(record.calls)}: {record.declined}"
        else:
            by = "" if record.package in ("", "polycast") else f" by {record.package}"
            yield f"{record.recipe} on {record.device}: {op} computed {times_text(record.calls)}{by}"
