"""Which fast dtypes the processor computes in itself, and which are converted to float32 and back."""

import platform

import torch

_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2"),
    torch.float16: ("avx512_fp16", "amx_fp16", "avx10_2"),
}
"""Any of these is enough; those of x86, of which torch tells which there are."""


def missing_instructions(dtype: torch.dtype) -> str | None:
    """Say what the processor lacks to compute in a dtype; None where it lacks nothing, or that is not known."""
    wanted = _INSTRUCTIONS.get(dtype, ())
    there = _capabilities()
    if not wanted or not there or any(there.get(name) for name in wanted):
        return None
    return f"the processor has none of {', '.join(wanted)}"


def _capabilities() -> dict[str, object]:
    if platform.machine().lower() not in ("x86_64", "amd64") or not hasattr(torch.cpu, "get_capabilities"):
        return {}
    return dict(torch.cpu.get_capabilities())
