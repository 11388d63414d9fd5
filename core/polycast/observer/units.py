"""Format sizes."""


def size(count: float) -> str:
    """Format a number of bytes, as in ``1.5 KB``."""
    for unit in ("bytes", "KB", "MB"):
        if abs(count) < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
