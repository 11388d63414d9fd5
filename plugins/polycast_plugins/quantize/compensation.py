"""`compensate_errors`: round a weight's columns one by one, and let the later ones make up for the errors (GPTQ)."""

from collections.abc import Callable

import torch

_DAMPING = 0.01
"""The number added to the diagonal of the moments, relative to its mean: few rows of inputs determine too little."""


def compensate_errors(
    weight: torch.Tensor,
    moments: torch.Tensor,
    block: int,
    round_column: Callable[[int, torch.Tensor], torch.Tensor],
) -> None:
    """Round a weight column by column, with the least squared error of its products (arXiv 2210.17323).

    Each column's error is made up for by the columns after it, in proportion to how the inputs go together.

    Args:
        weight: [N, K], a row for each output feature; it is not changed.
        moments: float32 [K, K], the sum of ``x.T @ x`` over activations `x`, [rows, K].
        block: the number of columns after which the others are updated together.
        round_column: ``round_column(k, columns)`` returns column `k` rounded, float32 [N]. `columns`, float32 [L, N],
            are column `k` and those after it in its block, with what they have made up for so far.

    Raises:
        ValueError: the moments have inf or nan.
    """
    columns = weight.t().to(torch.float32, copy=True).contiguous()
    inverse = _factor_of_inverse(moments)
    for first in range(0, len(columns), block):
        part = columns[first : first + block]
        after = first + len(part)
        errors = torch.empty_like(part)
        for k in range(len(part)):
            shares = inverse[first + k, first + k : after]
            torch.div(part[k] - round_column(first + k, part[k:]), shares[0], out=errors[k])
            part[k + 1 :].addr_(shares[1:], errors[k], alpha=-1)
        columns[after:].addmm_(inverse[first:after, after:].t(), errors, alpha=-1)


def _factor_of_inverse(moments: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular factor of the moments' inverse."""
    damped = moments.clone()
    diagonal = damped.diagonal()
    if not bool(diagonal.isfinite().all()):
        raise ValueError("the moments of the activations have inf or nan")
    typical = diagonal.mean().item() or 1.0
    diagonal[diagonal == 0] = typical  # a channel that was always zero
    damping = _DAMPING * typical
    while True:
        diagonal += damping
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            return upper
        damping *= 10
