"""Twenty scenarios against torch.autocast: common models, and common ways of running them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

from .once import LIBRARIES, NOT_SLOWER, duel
from .timing import Race, Ratio, Several, Side


def _bert() -> tuple[nn.Module, torch.Tensor]:
    config = BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    return BertModel(config).eval(), torch.randint(1000, (4, 64))


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic")
    return ResNetModel(config).eval(), torch.randn(2, 3, 64, 64)


def _vit() -> tuple[nn.Module, torch.Tensor]:
    config = ViTConfig(
        num_hidden_layers=4, hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=64, patch_size=8
    )
    return ViTModel(config).eval(), torch.randn(2, 3, 64, 64)


def _gpt2() -> tuple[nn.Module, torch.Tensor]:
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4)).eval(), torch.randint(1000, (1, 16))


class _First(nn.Module):
    """Returns the output of a recurrent layer, without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


def _lstm() -> tuple[nn.Module, torch.Tensor]:
    return _First(nn.LSTM(128, 128, num_layers=2)), torch.randn(20, 4, 128)


def _encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), torch.randn(4, 32, 128)


def _small() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(24) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(8, 32)


MODELS = {
    "ResNet": _resnet,
    "BERT": _bert,
    "ViT": _vit,
    "GPT-2": _gpt2,
    "LSTM": _lstm,
    "TransformerEncoder": _encoder,
    "24 small layers": _small,
}
INFERENCE = [
    *((name, "frozen", torch.no_grad) for name in MODELS),
    *((name, "trainable", torch.no_grad) for name in ("BERT", "LSTM", "ResNet")),
    *((name, "frozen", torch.inference_mode) for name in ("BERT", "GPT-2")),
]


def _loss(out: Any) -> torch.Tensor:
    values = out if isinstance(out, torch.Tensor) else out[0]
    loss: torch.Tensor = values.float().square().mean()
    return loss


def _training(name: str, *, batches: int = 1) -> Race:
    def step(amp: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model, x = MODELS[name]()
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def run() -> None:
            optimizer.zero_grad()
            for _ in range(batches):
                with amp.autocast("cpu"):
                    loss = _loss(model(x)) / batches
                loss.backward()
            optimizer.step()

        return run

    sides = {label: Side("step()", {"step": step(amp)}, kernels=label) for label, amp in LIBRARIES.items()}
    what = f"{name}, training step" + (f" of {batches} batches" if batches > 1 else "")
    return Race(
        sides=sides, ratios=[Ratio(what, "torch.autocast", "polycast", "torch", NOT_SLOWER)], rounds=14, seconds=0.05
    )


def _region_for_each_layer() -> Race:
    model, x = _small()
    model.requires_grad_(False)
    sides = {
        label: Side(
            "y = x\nfor layer in model:\n    with autocast('cpu'): y = layer(y)",
            {"autocast": amp.autocast, "model": model, "x": x},
            torch.no_grad,
            kernels=label,
        )
        for label, amp in LIBRARIES.items()
    }
    what = "24 small layers, frozen, a region for each"
    return Race(sides=sides, ratios=[Ratio(what, "torch.autocast", "polycast", "torch", NOT_SLOWER)], rounds=14)


def _float16() -> Race:
    model, x = _small()
    model.requires_grad_(False)
    statement, names = "with autocast('cpu', float16): model(x)", {"float16": torch.float16, "model": model, "x": x}
    sides = {
        label: Side(statement, {**names, "autocast": amp.autocast}, torch.no_grad, kernels=label)
        for label, amp in LIBRARIES.items()
    }
    what = "24 small layers, frozen, float16"
    return Race(sides=sides, ratios=[Ratio(what, "torch.autocast", "polycast", "torch", NOT_SLOWER)], rounds=14)


def _all() -> Iterator[Race]:
    for name, kind, mode in INFERENCE:
        model, x = MODELS[name]()
        model.requires_grad_(kind == "trainable")
        what = f"{name}, {kind}, {mode.__name__}"
        yield duel(what, functools.partial(model, x), NOT_SLOWER, mode, rounds=14, seconds=0.03)
    for name in ("BERT", "ResNet", "LSTM", "24 small layers"):
        yield _training(name)
    yield _training("BERT", batches=4)
    yield _region_for_each_layer()
    yield _float16()
    model, x = _bert()
    yield duel("BERT, trainable, forward with grad", functools.partial(model, x), NOT_SLOWER, nullcontext, rounds=14)


scenarios = functools.partial(Several, _all)
