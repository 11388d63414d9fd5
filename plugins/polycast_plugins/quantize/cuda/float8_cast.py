"""Casts to float8 (e4m3) with scales: by one Triton kernel if Triton is installed, else by ATen ops."""

import functools
import importlib
from types import ModuleType

import torch

from .float8_numbers import FLOAT8, LARGEST, SMALLEST


def cast_rows(matrix: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in float8 and its float32 scales: [rows, 1], or a scalar.

    Values that are not finite become nan, and the scales ignore them.
    """
    fused = _fused() if matrix.is_cuda else None
    if fused is None:
        return cast_with_aten(matrix, by_row)
    with torch.cuda.device(matrix.device):  # Triton launches on the current device
        values, scale = fused.cast_rows(matrix if matrix.stride(1) == 1 else matrix.contiguous(), by_row)
    return values, scale


def cast_with_aten(matrix: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, by ATen ops."""
    matrix = matrix.float()
    finite = matrix.isfinite()
    sizes = matrix.abs().where(finite, 0)
    largest = sizes.amax(1, keepdim=True) if by_row else sizes.amax()
    scale = largest.clamp(min=SMALLEST) / LARGEST
    # Some versions of torch cast inf to the largest number.
    values = (matrix / scale).where(finite, torch.nan).to(FLOAT8)
    return values.contiguous(), scale


@functools.cache
def _fused() -> ModuleType | None:
    try:
        return importlib.import_module(".float8_triton", __package__)
    except ImportError:
        return None
