"""Twenty scenarios against torch.autocast: common models, and common ways of running them."""

import functools
from collections.abc import Sequence
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

from .once import NOT_SLOWER
from .timing import Several
from .ways import Autocast, Case, Inference, Training, races


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


def _region_for_each_layer(model: nn.Module, x: torch.Tensor, autocast: Autocast) -> object:
    for layer in model.children():
        with autocast("cpu"):
            x = layer(x)
    return x


def _float16(model: nn.Module, x: torch.Tensor, autocast: Autocast) -> object:
    with autocast("cpu", torch.float16):
        return model(x)


_SHORT, _LONG = {"rounds": 14, "seconds": 0.03}, {"rounds": 14, "seconds": 0.05}
SCENARIOS: Sequence[Case] = (
    *(
        Inference(f"{name}, {kind}, {mode.__name__}", MODELS[name], kind == "trainable", mode, options=_SHORT)
        for name, kind, mode in INFERENCE
    ),
    *(
        Training(f"{name}, training step", MODELS[name], options=_LONG)
        for name in ("BERT", "ResNet", "LSTM", "24 small layers")
    ),
    Training("BERT, training step of 4 batches", MODELS["BERT"], batches=4, options=_LONG),
    Inference(
        "24 small layers, frozen, a region for each", _small, forward=_region_for_each_layer, options={"rounds": 14}
    ),
    Inference(
        "24 small layers, frozen, float16", _small, forward=_float16, dtype=torch.float16, options={"rounds": 14}
    ),
    Inference("BERT, trainable, forward with grad", _bert, trainable=True, around=nullcontext, options={"rounds": 14}),
)

scenarios = functools.partial(Several, functools.partial(races, SCENARIOS, NOT_SLOWER))
