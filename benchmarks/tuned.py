"""Models tuned for time, against float32 and the region without a policy, which must not be faster."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from examples.demo import network
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import polycast

from .timing import Race, Ratio, Several, Side

NOT_SLOWER = 1.05
_TOLERANCE = 0.05
_SHORT = "the demo's network, 1 image", "an MLP, batch 1"
"""They take a tenth of a millisecond: entering a region and applying a rule take a noticeable share of it."""


def _demo(images: int) -> tuple[nn.Module, Any]:
    return network("cpu").eval(), torch.rand(images, 1, 8, 8)


def _mlp(batch: int) -> tuple[nn.Module, Any]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers).eval(), torch.randn(batch, 512)


def _gpt2(tokens: int) -> tuple[nn.Module, Any]:
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False)).eval()
    return model, torch.randint(1000, (1, tokens))


CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "the demo's network, 1 image": functools.partial(_demo, 1),
    "the demo's network, 360 images": functools.partial(_demo, 360),
    "an MLP, batch 1": functools.partial(_mlp, 1),
    "an MLP, batch 256": functools.partial(_mlp, 256),
    "GPT-2 of 4 layers, decoding 1 token": functools.partial(_gpt2, 1),
    "GPT-2 of 4 layers, prefill of 128": functools.partial(_gpt2, 128),
}


def _race(what: str, model: nn.Module, x: torch.Tensor) -> Race:
    tuned = polycast.tune(model, x, tolerance=_TOLERANCE, device_type="cpu", objective="time")
    ruled = copy.deepcopy(model)
    polycast.apply_policy(ruled, tuned.policy)
    region = "with autocast('cpu'): model(x)"
    names = {"autocast": polycast.autocast, "x": x}
    sides = {
        "float32": Side("model(x)", {**names, "model": model}, torch.no_grad),
        "region": Side(region, {**names, "model": model}, torch.no_grad),
        "tuned": Side(region, {**names, "model": ruled}, torch.no_grad),
    }
    ratios = [
        Ratio(f"{what}, tuned for time", "float32", "tuned", "float32", None if what in _SHORT else NOT_SLOWER),
        Ratio(f"{what}, tuned for time", "the plain region", "tuned", "region", NOT_SLOWER),
    ]
    return Race(sides=sides, ratios=ratios, rounds=20, seconds=0.03)


def _all() -> Iterator[Race]:
    for what, make in CASES.items():
        torch.manual_seed(0)
        yield _race(what, *make())


tuned = functools.partial(Several, _all)
