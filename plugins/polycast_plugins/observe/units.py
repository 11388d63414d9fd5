"""Format sizes, shares, numbers of times and modules."""

MUCH_UNDERFLOW = 0.1
"""The smallest share of underflow that is a finding."""


def size(count: float) -> str:
    """Format a number of bytes, as in ``1.5 KB``."""
    for unit in ("bytes", "KB", "MB"):
        if abs(count) < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def percent(share: float) -> str:
    """Format a share, as in ``41%``; only 0 is written as 0%, and only 1 as 100%."""
    if 0.995 <= share < 1:
        return "over 99%"
    return f"{100 * share:.0f}%" if share >= 0.1 or not share else f"{100 * share:.2g}%"


def module_text(name: str | None) -> str:
    """Return the name of a module, as text."""
    if name is None:
        return "outside of the model's modules"
    return name or "the model"


def times_text(count: int) -> str:
    """Format a number of times, as in ``3 times``."""
    return "once" if count == 1 else f"{count:,} times"
