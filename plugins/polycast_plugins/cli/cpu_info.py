"""Read the name and the properties of the processor from the system."""

import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_info() -> dict[str, str]:
    """Return what Linux says in ``/proc/cpuinfo``, by the first processor that says it; empty on other systems."""
    if not _CPU_INFO.is_file():
        return {}
    lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


def processor_name() -> str:
    """Return the name of the processor, or at least its architecture."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()
