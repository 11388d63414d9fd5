"""Format the counts of a report."""

from collections.abc import Mapping

from ..records import Decision, Op

_PATTERNS = {"bfloat16": "d0", "float16": "d1", "float32": "d2", "float64": "d3"}
_OTHER = "d4"
_RULES = {"none": "no rule"}


def duration(seconds: float) -> str:
    """Format seconds, as in ``1.5 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"


def pattern(dtype: str) -> str:
    """Return the CSS class of a dtype."""
    return _PATTERNS.get(dtype, _OTHER)


def in_order(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return counts by dtype in the order of the bars."""
    return sorted(counts.items(), key=lambda each: pattern(each[0]))


def ruled(decided: Op | Decision) -> str:
    """Format the rule that decided."""
    return " ".join(filter(None, (_RULES.get(decided.rule, decided.rule), decided.rule_name)))
