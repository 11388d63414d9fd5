"""`Int4Levels`: rounds the columns of a weight, one by one, to what `Int4Matmul` multiplies."""

import torch

CHUNK = 256
"""The terms of a chunk of small groups."""
_MULTIPLIERS = 15
"""The largest magnitude of a multiplier."""
_SMALLEST = 2.0**-110
"""The smallest magnitude that a scale is made of: its inverse is a normal number."""


class Int4Levels:
    """The levels, multipliers and scales of a weight, chosen column by column; see `int4.py` for what they are.

    Args:
        outputs, terms: N and K.
        group_size: 32, 64 or 128.
        device: where the columns are.
    """

    def __init__(self, outputs: int, terms: int, group_size: int, device: torch.device) -> None:
        self._group, self._chunk = group_size, CHUNK // group_size * group_size
        self._levels = torch.zeros(terms + terms % 2, outputs, dtype=torch.uint8, device=device)
        self._multipliers = torch.empty(-(-terms // self._group), outputs, dtype=torch.int8, device=device)
        self._scales = torch.empty(-(-terms // self._chunk), outputs, dtype=torch.bfloat16, device=device)
        self._scale = self._step = torch.empty(0)

    def round_column(self, k: int, columns: torch.Tensor) -> torch.Tensor:
        """Return column `k` rounded, given it and those after it, [L, N]; see `compensate_errors`."""
        if k % self._chunk == 0:
            largest = columns[: self._chunk].abs().amax(0).clamp(min=_SMALLEST)
            self._scales[k // self._chunk] = largest / (8 * _MULTIPLIERS)
            self._scale = self._scales[k // self._chunk].float()
        if k % self._group == 0:
            multipliers = self._multipliers[k // self._group] = _best_multipliers(columns[: self._group] / self._scale)
            self._step = multipliers * self._scale
        levels = (columns[0] / self._step).round().clamp(-8, 7)
        self._levels[k] = (levels + 8).to(torch.uint8)
        return levels * self._step

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `Int4Matmul.prepack` takes, in host memory, a row for each output feature.

        Returns:
            The levels plus 8, uint8 [N, K / 2 rounded up], even terms in the low halves; the multipliers, int8 [N,
            groups]; and the scales, bfloat16 [N, chunks].
        """
        halves = self._levels[::2] | self._levels[1::2] << 4
        return _rows(halves), _rows(self._multipliers), _rows(self._scales)


def _rows(columns: torch.Tensor) -> torch.Tensor:
    return columns.t().contiguous().cpu()


def _best_multipliers(terms: torch.Tensor) -> torch.Tensor:
    """Return the multipliers [N] with the least squared errors, given a group's terms [L, N] in units of the scale.

    The largest one, which may be beyond the scale by errors compensated in it, comes near the lowest or highest level.
    """
    least, most = terms.aminmax(dim=0)
    largest = torch.where(most > -least, most, least)
    best, errors = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for level in (-8, 7):
        near = (largest / level).round().clamp(-_MULTIPLIERS, _MULTIPLIERS)
        for multiplier in (near, near - 1, near + 1, near - 2, near + 2):
            step = torch.where(multiplier == 0, 1.0, multiplier)
            error = (terms - (terms / step).round().clamp(-8, 7) * step).square().sum(0)
            error[(multiplier == 0) | (multiplier.abs() > _MULTIPLIERS)] = torch.inf
            best, errors = torch.where(error < errors, multiplier, best), torch.minimum(error, errors)
    return best
