"""Measure the accuracy of trained models in float32, bfloat16 and int8, on held-out data.

Each model has its own measure. The recipe computes every matmul with a weight, small ones too.
"""

import copy
import importlib.metadata
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from examples.demo import FLOAT32, load_digits, train
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

import polycast

from .scores import Scores

CHECKPOINT = "antiberty", "0.1.3"
"""A distribution on the package index with a checkpoint in its wheel; later versions have none."""
CHECKPOINT_NAME = "AntiBERTy, a BERT of 26 million weights"

_SEED = 0
_WINDOW, _WIDTH, _HEADS, _BLOCKS = 64, 128, 4, 3
_BATCH, _STEPS, _QUICK_STEPS = 32, 800, 100
_OUTLIERS, _LARGER = (3, 41, 77), (50, 200)


def _scores(
    what: str,
    metric: str,
    kept: str,
    keep: Iterable[str],
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    score: Callable[[nn.Module], float],
) -> Scores:
    answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
    if not answer.available:
        return Scores(what, metric, kept, skipped=answer.reason)
    model.eval().requires_grad_(False)
    plain = polycast.Int8(min_size=0)
    recipes: dict[str, polycast.plugin.Recipe] = {
        "int8 by row": plain,
        "calibrated": plain.with_options(calibration=polycast.calibrate(model, batches, plain)),
        "by tensor": polycast.Int8("tensor", min_size=0),
        "by row, rules": polycast.Int8(min_size=0),
    }
    regions: dict[str, AbstractContextManager[Any]] = {
        "float32": nullcontext(),
        "bfloat16": polycast.autocast("cpu"),
        **{name: polycast.autocast("cpu", recipe=recipe) for name, recipe in recipes.items()},
    }
    found = {}
    for name, region in regions.items():
        rules = polycast.Policy(modules=dict.fromkeys(keep, "none") if name == "by row, rules" else {})
        with torch.no_grad(), polycast.apply_policy(model, rules), region:
            found[name] = score(model)
    return Scores(what, metric, kept, found)


def _digits() -> Scores:
    digits = load_digits("cpu")
    network = train(FLOAT32, "cpu", torch.bfloat16, digits).network

    def right(model: nn.Module) -> float:
        return (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item() * 100

    what = "digits, the demo's network, 360 images"
    batches = list(digits.images.split(32)[:8])
    return _scores(what, "right, %", "logits", ["logits"], network, batches, right)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = self.qkv(self.norm1(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*each, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return added


class _Characters(nn.Module):
    """A transformer that predicts the next character of a text."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, _WIDTH), nn.Embedding(_WINDOW, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letter(text) + self.place.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _text() -> tuple[torch.Tensor, int]:
    """Return the topics of pydoc, which come with Python, as numbers, and the number of different characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([letters[letter] for letter in text]), len(letters)


def _loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def _trained(text: torch.Tensor, letters: int, steps: int) -> _Characters:
    torch.manual_seed(_SEED)
    model = _Characters(letters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for _ in range(steps):
        starts = torch.randint(len(text) - _WINDOW - 1, (_BATCH, 1))
        optimizer.zero_grad()
        _loss(model, text[starts + torch.arange(_WINDOW + 1)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def _with_outliers(model: _Characters, larger: float) -> _Characters:
    """Return the same function with outlier channels in the inputs of matmuls, as in large models."""
    planted = copy.deepcopy(model)
    pairs = [(planted.norm, planted.head)]
    for block in planted.blocks:
        pairs += [(block.norm1, block.qkv), (block.norm2, block.up)]
    with torch.no_grad():
        for norm, linear in pairs:
            for channel in _OUTLIERS:
                norm.weight[channel] *= larger
                norm.bias[channel] *= larger
                linear.weight[:, channel] /= larger
    return planted


def _characters(steps: int) -> Iterator[Scores]:
    text, letters = _text()
    rest = len(text) * 9 // 10
    model = _trained(text[:rest], letters, steps)
    windows = text[rest:].unfold(0, _WINDOW + 1, _WINDOW)

    def perplexity(model: nn.Module) -> float:
        return math.exp(_loss(model, windows).item())

    what, keep = "a character transformer", ["head", "blocks.0"]
    planted = {f"{what}, with outliers times {larger}": _with_outliers(model, larger) for larger in _LARGER}
    batches = list(text[:rest].unfold(0, _WINDOW, rest // 32).split(8))
    for named, network in {what: model, **planted}.items():
        yield _scores(named, "perplexity", "head and first block", keep, network, batches, perplexity)


@dataclass(frozen=True)
class Checkpoint:
    """A published BERT of proteins, its tokens, and the sequences that it is measured on."""

    model: BertForMaskedLM
    tokens: Mapping[str, int]
    sequences: Sequence[str]

    def masked(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield sequences of L residues, masked one by one, [L, L + 2], and whole, [L + 2]."""
        for sequence in self.sequences:
            names = ["[CLS]", *sequence, "[SEP]"]
            whole = torch.tensor([self.tokens[name] for name in names])
            places = torch.arange(1, len(whole) - 1)
            each = whole.repeat(len(places), 1)
            each[places - 1, places] = self.tokens["[MASK]"]
            yield each, whole


def load_checkpoint() -> Checkpoint | str:
    """Return the checkpoint, or why it is missing."""
    name, version = CHECKPOINT
    missing = f"{name} {version} is not installed: pip install --no-deps {name}=={version}"
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return missing
    folder = Path(str(distribution.locate_file("antiberty/trained_models")))
    files = folder / "AntiBERTy_md_smooth"
    if not (files / "pytorch_model.bin").exists():
        return missing
    model = BertForMaskedLM(BertConfig.from_json_file(str(files / "config.json")))
    weights = torch.load(files / "pytorch_model.bin", weights_only=True, map_location="cpu")
    lacking = set(model.state_dict()) - set(weights)
    assert not lacking, lacking
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    tokens = {token: number for number, token in enumerate((folder / "vocab.txt").read_text().split())}
    description = str(distribution.metadata.get_payload())  # its examples are sequences
    return Checkpoint(model, tokens, list(dict.fromkeys(re.findall(r'"([A-Z]{90,})"', description))))


def _checkpoint() -> Scores:
    what, metric, kept = CHECKPOINT_NAME, "perplexity, masked", "head and first layer"
    found = load_checkpoint()
    if isinstance(found, str):
        return Scores(what, metric, kept, skipped=found)
    checkpoint = found

    def perplexity(model: nn.Module) -> float:
        losses = []
        for each, whole in checkpoint.masked():
            places = torch.arange(1, len(whole) - 1)
            logits = model(each).logits[places - 1, places]
            losses.append(functional.cross_entropy(logits.float(), whole[places], reduction="none"))
        return math.exp(torch.cat(losses).mean().item())

    keep, batches = ["cls", "bert.encoder.layer.0"], [each[:16] for each, _ in checkpoint.masked()]
    return _scores(what, metric, kept, keep, checkpoint.model, batches, perplexity)


@dataclass(frozen=True)
class Accuracy:
    """The scores of all models."""

    def run(self, quick: bool) -> list[Scores]:
        """Return the scores of all models."""
        return [_digits(), *_characters(_QUICK_STEPS if quick else _STEPS), _checkpoint()]
