"""The kinds of processors that there are kernels for."""

import platform


def is_x86() -> bool:
    """Return whether this is a 64-bit x86 processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def is_arm() -> bool:
    """Return whether this is a 64-bit Arm processor."""
    return platform.machine().lower() in ("aarch64", "arm64")
