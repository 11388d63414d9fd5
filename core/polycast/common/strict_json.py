"""Write numbers as strict JSON."""

import math
from typing import Any


def jsonable(value: Any) -> Any:
    """Return inf and nan, which JSON lacks, as text that ``float()`` reads, and other values as they are."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
