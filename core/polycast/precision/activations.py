"""The activations that a weight is multiplied by: the largest of each channel, and a sample of rows."""

import torch

_ROWS = 64
"""The rows in a sample. With fewer terms than output features, they take a small part of the weight's memory."""


class Activations:
    """The activations of one weight, in memory that does not grow with their number.

    Attributes:
        amax: float32 [K], the largest magnitude of each input channel.
        rows: [up to 64, K], a sample in which each row is equally likely.
        left_out: whether rows were left out, because of inf or nan.
    """

    def __init__(self, terms: int, device: torch.device, generator: torch.Generator) -> None:
        self.amax = torch.zeros(terms, device=device)
        self.rows = torch.empty(0, terms, device=device)
        self.left_out = False
        self._keys = torch.empty(0)
        self._generator = generator

    @property
    def are_all_left_out(self) -> bool:
        """Whether there were rows, all with inf or nan."""
        return self.left_out and not len(self.rows)

    def add(self, x: torch.Tensor) -> None:
        """Add activations [..., K]. Rows with inf or nan are left out."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return
        amax = _amax(rows)
        if not bool(amax.isfinite().all()):
            self.left_out = True
            rows = rows[rows.isfinite().all(1)]
            if not len(rows):
                return
            amax = _amax(rows)
        torch.maximum(self.amax, amax, out=self.amax)
        keys, places = torch.rand(len(rows), generator=self._generator).topk(min(_ROWS, len(rows)))
        keys = torch.cat((self._keys, keys))
        self._keys, chosen = keys.topk(min(_ROWS, len(keys)))
        sample = rows[places.to(rows.device)].float()
        self.rows = torch.cat((self.rows, sample))[chosen.to(rows.device)]


def _amax(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each column, without a copy of the rows."""
    amax: torch.Tensor = torch.linalg.vector_norm(rows, torch.inf, dim=0)
    return amax.float()
