"""Describe the processor, and what limits the instructions that torch's kernels use."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""The variables that restrict the instructions of torch, oneDNN and MKL."""


def details() -> Mapping[str, str]:
    """Return the processor's name, the cores of this process, and the instructions that torch may use."""
    present = dict(getattr(torch.cpu, "get_capabilities", dict)())
    limits = {name: os.environ[name] for name in _LIMITS if os.environ.get(name)}
    return {
        "name": _name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": " ".join(sorted(name for name, has in present.items() if has is True)),
        **limits,
    }


def _name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        with info.open(encoding="utf-8", errors="replace") as lines:  # it is long, and made while it is read
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    return platform.processor() or platform.machine()
