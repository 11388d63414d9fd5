"""Summarize what a recorder counted in a step, without the records of an observation, which take longer to make."""

import torch

from polycast.plugin import dtype_name
from polycast.region.scaler_history import Origin

from .recorder import Reading, phase_of


def fast_time_share(reading: Reading) -> float | None:
    """Return the share of the time in ops that ops in the fast dtypes of the step's regions took."""
    fast = {row.fast for row in reading.counts if row.device is not None}
    fast |= {region.dtype for region in reading.regions if region.enabled}
    seconds = [each for row in reading.counts for each in row.seconds]
    total = sum(time for _, time in seconds)
    in_fast = sum(time for dtype, time in seconds if dtype in fast - {None, torch.float32})
    return in_fast / total if total else None


def underflow_share(reading: Reading, *, of_gradients: bool = False) -> float | None:
    """Return the share of the values of the step, or of its backward pass, that underflowed."""
    rows = [row for row in reading.numerics if row.backward or not of_gradients]
    count = sum(row.count for row in rows)
    return sum(row.underflowed for row in rows) / count if count else None


def first_nonfinite(reading: Reading) -> Origin | None:
    """Return the first op that produced inf or nan; None also without ``nonfinite="record"``."""
    row = reading.nonfinite
    if row is None:
        return None
    return Origin(
        op=row.op,
        phase=phase_of(row.backward),
        module=reading.name_of(row.module),
        what=" and ".join(name for name in ("inf", "nan") if getattr(row, name)),
        dtype=dtype_name(row.dtype),
        stack=tuple(row.stack or ()),
    )
