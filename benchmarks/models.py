"""Inference with float32 weights, against torch's region, a bfloat16 copy, and float32."""

import copy
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import polycast

from .timing import Race, Ratio, Side

_REGION = "with torch.no_grad(), autocast('cpu'): model(x)"
_CACHED = "with torch.no_grad(), autocast('cpu', cache=cache): model(x)"
_PLAIN = "with torch.no_grad(): model(x)"


def _torch(model: Any, x: torch.Tensor) -> Side:
    return Side(_REGION, {"torch": torch, "autocast": torch.autocast, "model": model, "x": x}, kernels="torch")


def _default(model: Any, x: torch.Tensor) -> Side:
    return Side(_REGION, {"torch": torch, "autocast": polycast.autocast, "model": model, "x": x})


def _cached(model: Any, x: torch.Tensor) -> Side:
    names = {"torch": torch, "autocast": polycast.autocast, "model": model, "x": x, "cache": polycast.WeightCache()}
    return Side(_CACHED, names)


def _copy(model: Any, x: torch.Tensor) -> Side:
    return Side(_PLAIN, {"torch": torch, "model": copy.deepcopy(model).bfloat16(), "x": x}, kernels="torch")


def _float32(model: Any, x: torch.Tensor) -> Side:
    return Side(_PLAIN, {"torch": torch, "model": model, "x": x}, kernels="torch")


def linears() -> Race:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
    x = torch.randn(1, 2048)
    sides = {
        "torch": _torch(model, x),
        "default": _default(model, x),
        "cached": _cached(model, x),
        "copy": _copy(model, x.bfloat16()),
        "float32": _float32(model, x),
    }
    ratios = [
        Ratio("8 x Linear(2048, 2048), batch 1, default region", "torch.autocast", "default", "torch", 0.32),
        Ratio("8 x Linear(2048, 2048), batch 1, WeightCache", "torch.autocast", "cached", "torch", 0.12),
        Ratio("8 x Linear(2048, 2048), batch 1, WeightCache", "a bfloat16 copy", "cached", "copy", 1.05),
        Ratio("8 x Linear(2048, 2048), batch 1, WeightCache", "float32", "cached", "float32", None),
    ]
    return Race(sides=sides, ratios=ratios, rounds=15, seconds=0.05)


def gpt2() -> Race:
    trainable = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    frozen = copy.deepcopy(trainable).requires_grad_(False)
    token = torch.tensor([[464]])
    sides = {
        "torch, trainable": _torch(trainable, token),
        "torch, frozen": _torch(frozen, token),
        "trainable": _cached(trainable, token),
        "frozen": _cached(frozen, token),
        "copy": _copy(frozen, token),
        "float32": _float32(frozen, token),
    }
    ratios = [
        Ratio("GPT-2 small, 1 token, WeightCache, trainable", "torch.autocast", "trainable", "torch, trainable", 0.25),
        Ratio("GPT-2 small, 1 token, WeightCache, frozen", "torch.autocast", "frozen", "torch, frozen", 0.35),
        Ratio("GPT-2 small, 1 token, WeightCache, trainable", "a bfloat16 copy", "trainable", "copy", 1.08),
        Ratio("GPT-2 small, 1 token, WeightCache, frozen", "a bfloat16 copy", "frozen", "copy", 1.08),
        Ratio("GPT-2 small, 1 token, WeightCache, trainable", "float32", "trainable", "float32", None),
    ]
    return Race(sides=sides, ratios=ratios, rounds=9, seconds=0.05)
