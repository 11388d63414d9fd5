"""Describe the processor, and what limits the instructions that torch's kernels use."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""The variables that restrict the instructions of torch, oneDNN and MKL."""


def processor_details() -> Mapping[str, str]:
    """Return the processor's name and model, the cores of this process, and the instructions that torch may use."""
    about = _first_processor()
    present = dict(getattr(torch.cpu, "get_capabilities", dict)())
    limits = {name: os.environ[name] for name in _LIMITS if os.environ.get(name)}
    return {
        "name": _name(about),
        "model": " ".join(about[key] for key in _MODEL if key in about),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": " ".join(sorted(name for name, has in present.items() if has is True)),
        **limits,
    }


def _name(about: Mapping[str, str]) -> str:
    """Return the processor's name; of one without a number, as a virtual machine may show it, also family and model."""
    name = about.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key.split()[-1]} {about[key]}" for key in ("cpu family", "model") if key in about]
    return name if any(map(str.isdigit, name)) else ", ".join([name, *numbers])


def kernel_settings() -> Mapping[str, str]:
    """Return the settings of torch that select the kernels of matmuls and attention, but for defaults."""
    onednn: Any = torch.backends.mkldnn
    attention: Any = torch.backends.cuda  # the settings of attention there are for all devices
    by_name = {
        "oneDNN": "on" if onednn.enabled else "off",
        "float32 matmuls": onednn.matmul.fp32_precision,
        "flash attention": "on" if attention.flash_sdp_enabled() else "off",
        "math attention": "on" if attention.math_sdp_enabled() else "off",
    }
    return {name: value for name, value in by_name.items() if value not in _DEFAULTS}


_DEFAULTS = ("on", "none", "ieee")
"""A precision that is not set is that of IEEE 754."""
_MODEL = ("cpu family", "model", "stepping", "cache size", "CPU implementer", "CPU part", "CPU variant")
"""Keys of /proc/cpuinfo that distinguish processors of the same name, as in virtual machines."""


def _first_processor() -> Mapping[str, str]:
    """Return what Linux says about the first processor."""
    info, about = Path("/proc/cpuinfo"), {}
    if info.is_file():
        with info.open(encoding="utf-8", errors="replace") as lines:  # made while it is read, and long
            for line in lines:
                key, _, value = line.partition(":")
                if not key.strip():
                    break
                about[key.strip()] = value.strip()
    return about
