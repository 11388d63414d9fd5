"""Summarize an observation in a line."""

from collections import Counter
from collections.abc import Iterator

from .observation import Observation
from .units import size


def headline(seen: Observation) -> str:
    """Return the share of ops in a fast dtype, the casts, and the kinds of findings."""
    return "; ".join(_parts(seen))


def _parts(seen: Observation) -> Iterator[str]:
    fast = " and ".join(dict.fromkeys(dtype for dtypes in seen.run.devices.values() for dtype in dtypes))
    if seen.fast_share is None or not fast:
        yield f"{seen.total.calls:,} calls of ops, no region was enabled" if seen.ops else "no op ran"
    else:
        of_time = "" if seen.fast_time_share is None else f" and {seen.fast_time_share:.0%} of their time"
        yield f"{seen.fast_share:.0%} of the floating-point ops{of_time} in {fast}"
    yield f"{seen.total.casts:,} casts of {size(seen.total.cast_bytes)}"
    found = Counter(finding.kind.replace("_", " ") for finding in seen.findings)
    each = (f"{kind} ({count} places)" if count > 1 else kind for kind, count in found.items())
    yield f"findings: {', '.join(each)}" if found else "no findings"
