"""The settings of torch that select its kernels on CUDA."""

from collections.abc import Mapping
from typing import Any

import torch

_DEFAULTS = ("on", "any", "none", "ieee")
"""A precision that is not set is that of IEEE 754."""


def kernel_settings() -> Mapping[str, str]:
    """Return the settings that select the kernels of matmuls, convolutions and attention, but for defaults."""
    cuda: Any = torch.backends.cuda
    switches = {
        "flash attention": cuda.flash_sdp_enabled(),
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled(),
        "cuDNN attention": cuda.cudnn_sdp_enabled(),
        "math attention": cuda.math_sdp_enabled(),
        "cuDNN": torch.backends.cudnn.enabled,
    }
    by_name = {
        **{name: "on" if is_on else "off" for name, is_on in switches.items()},
        "float32 matmuls": cuda.matmul.fp32_precision,
        "algorithms": "deterministic" if torch.are_deterministic_algorithms_enabled() else "any",
    }
    return {name: value for name, value in by_name.items() if value not in _DEFAULTS}
