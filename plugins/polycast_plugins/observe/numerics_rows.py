"""Turn what a recorder counted of numerics into records."""

from polycast.plugin import dtype_name

from .numerics_records import NumericsRecord
from .recorder import NumericsRow, Reading, phase_of
from .sums import combine


def numerics_of(reading: Reading) -> tuple[NumericsRecord, ...]:
    """Return the records, in the order of modules and ops, forward before backward."""
    ordered = sorted(reading.numerics, key=lambda row: (row.backward, row.module, row.op, row.of))
    return combine(_record(row, reading.name_of(row.module)) for row in ordered)


def _record(row: NumericsRow, module: str | None) -> NumericsRecord:
    return NumericsRecord(
        module=module,
        op=row.op,
        role=phase_of(row.backward),
        dtype=dtype_name(row.dtype),
        count=row.count,
        amax=row.amax,
        underflowed=row.underflowed,
        overflowed=row.overflowed,
        of=row.of,
        source="" if row.source is None else dtype_name(row.source),
        zeroed=row.zeroed,
        nonfinite=row.nonfinite,
    )
