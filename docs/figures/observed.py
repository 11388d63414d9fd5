"""The training run that docs/report.svg shows."""

import torch
from torch import nn

import polycast
from polycast_plugins.observe import Observation


class Block(nn.Module):
    """A transformer block: attention and an MLP, with pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class TinyGPT(nn.Module):
    """A language model of two blocks."""

    def __init__(self, words: int = 256, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for each position."""
        return self.head(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]]))


def run() -> Observation:
    """Observe a training step of two micro-batches."""
    torch.manual_seed(0)
    model, words = TinyGPT(), torch.randint(256, (2, 4, 32))
    with polycast.observe(model, timing=True) as seen:
        for batch in words:
            with polycast.autocast("cpu"):
                loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
    return seen
