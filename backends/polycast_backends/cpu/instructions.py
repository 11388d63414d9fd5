"""Find the fast dtypes that the processor supports natively; others are converted to float32 and back."""

import platform
from typing import Any

import torch

_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2"),
    torch.float16: ("avx512_fp16", "amx_fp16", "avx10_2"),
}
"""The x86 instructions of which any one is enough. torch reports no others."""


def missing_instructions(dtype: torch.dtype) -> str | None:
    """Return which instructions for a dtype the processor lacks, and what ops do; None if none, or unknown."""
    wanted = _INSTRUCTIONS.get(dtype, ())
    present = capabilities()
    if not wanted or not present or any(present.get(name) for name in wanted):
        return None
    return f"the processor has none of {', '.join(wanted)}, so ops convert to float32 and back"


def has_lstm(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes and trains LSTMs in a dtype on this processor; true if this torch does not say.

    In a region torch chooses oneDNN by the dtype of the input, float32, and raises if the processor lacks instructions.
    oneDNN trains no LSTM in float16 on any.
    """
    supports: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return dtype is torch.bfloat16 and (supports is None or bool(supports()))


def capabilities() -> dict[str, object]:
    """Return the instruction sets and other properties of an x86 processor, by torch's names; empty for others."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not hasattr(torch.cpu, "get_capabilities"):
        return {}
    return dict(torch.cpu.get_capabilities())
