"""The cast to float8 as a Triton kernel, with a program for each row: the row stays in the cache between two passes."""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_FLOAT8 = torch.float8_e4m3fn
_MAX_AT_ONCE = 4096


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rows(  # type: ignore[no-untyped-def]
    matrix,
    values,
    scales,
    columns,
    step,
    smallest,
    largest_float8,
    FINDS: tl.constexpr,
    CASTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Find the scale of a row if FINDS, else load the shared one; cast the row if CASTS."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, AT_ONCE)
    infinite = float("inf")
    if FINDS:
        sizes = tl.zeros([AT_ONCE], tl.float32)
        for start in range(0, columns, AT_ONCE):
            at = start + places
            size = tl.abs(tl.load(matrix + row * step + at, mask=at < columns, other=0.0).to(tl.float32))
            sizes = tl.maximum(sizes, tl.where(size < infinite, size, 0.0))
        scale = tl.maximum(tl.max(sizes, 0), smallest) / largest_float8
        tl.store(scales + row, scale)
    else:
        scale = tl.load(scales)
    if CASTS:
        for start in range(0, columns, AT_ONCE):
            at = start + places
            value = tl.load(matrix + row * step + at, mask=at < columns, other=0.0).to(tl.float32)
            value = tl.where(tl.abs(value) < infinite, value / scale, float("nan"))
            tl.store(values + row * columns + at, value.to(tl.float8e4nv), mask=at < columns)


def cast_rows(matrix: torch.Tensor, by_row: bool, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix with dense rows in float8, and its scales: see :func:`.float8.cast_rows`."""
    rows, columns = matrix.shape
    values = torch.empty((rows, columns), dtype=_FLOAT8, device=matrix.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=matrix.device)
    at_once = min(triton.next_power_of_2(columns), _MAX_AT_ONCE)
    common = (columns, matrix.stride(0), smallest, torch.finfo(_FLOAT8).max)
    if by_row:
        _rows[rows,](matrix, values, scales, *common, FINDS=True, CASTS=True, AT_ONCE=at_once)
        return values, scales
    _rows[rows,](matrix, values, scales, *common, FINDS=True, CASTS=False, AT_ONCE=at_once)
    scale = scales.amax()
    _rows[rows,](matrix, values, scale, *common, FINDS=False, CASTS=True, AT_ONCE=at_once)
    return values, scale
