"""Find the first op of a step that produced inf or nan, in an observation of the step."""

from collections.abc import Callable

from polycast.region.recording_scaler import RecordingGradScaler
from polycast.region.scaler_history import Origin, SkippedStep

from .facts import Facts
from .observation import Observation


def origin_of(seen: Observation) -> Origin | None:
    """Return the first op that produced inf or nan, which ``nonfinite="record"`` finds."""
    first = seen.nonfinite
    if first is None:
        return None
    return Origin(first.op, first.phase, first.module, first.what, first.dtype, first.stack)


def origin_by_numerics(facts: Facts) -> Origin | None:
    """Return an op with an overflow: of the first module in the forward pass, else of the last in backward."""
    order = {module.module: number for number, module in enumerate(facts.modules)}
    overflows = [record for record in facts.numerics if record.overflowed]
    forward = [record for record in overflows if record.role == "forward"]
    pick = min if forward else max
    if not overflows:
        return None
    first = pick(forward or overflows, key=lambda record: order.get(record.module or "", -1))
    return Origin(first.op, first.role, first.module, "inf or nan", first.dtype)


class StepOrigins:
    """Reports to scalers the op that made a step non-finite, if an observation of many steps has found it.

    An observation keeps the first such op only, so that is known for the first step with one.

    Args:
        seen: the observation.
        nonfinite_count: returns how many ops have produced inf or nan so far.
    """

    def __init__(self, seen: Observation, nonfinite_count: Callable[[], int]) -> None:
        self._seen, self._count = seen, nonfinite_count
        self._count_before = 0

    def origin(self, scaler: RecordingGradScaler) -> Origin | None:
        """Return the first op, if it belongs to this step."""
        return None if self._count_before or not self._count() else origin_of(self._seen)

    def updated(self, scaler: RecordingGradScaler, scale: float | None, skip: SkippedStep | None) -> None:
        """Note how many such ops there were by the end of the step."""
        self._count_before = self._count()
