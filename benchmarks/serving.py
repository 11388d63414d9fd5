"""A LLaMA with low-bit weights as a server runs it: generate() beside a loop of forward passes, and servers at work."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

import polycast

from . import servers
from .fastest import llama
from .servers import PROMPT, TOKENS
from .timing import Result

_TURNS = 4


class _Times:
    """Notes when each token is put."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


class Serving:
    """The seconds of a token after a prompt in each loop, and the tokens a second of servers."""

    def run(self, quick: bool) -> list[Result]:
        """Return the figures; with `quick`, those of two layers."""
        torch.manual_seed(0)
        model: Any = llama(layers=2 if quick else 22)
        for config in (model.config, model.generation_config):
            config.update({"eos_token_id": None, "pad_token_id": 0})  # answers have all tokens
        with tempfile.TemporaryDirectory() as name:
            servers.prepare(model, Path(name))
            return servers.measure(Path(name), quick) + _loops(model)


def _loops(model: Any) -> list[Result]:
    """Return the ratios of generate() to the faster loop of forward passes."""
    config = model.config
    region = polycast.autocast("cpu", recipe="int4", cache=polycast.WeightCache())
    model.forward = region(model.forward)
    loops: dict[str, Callable[[], float]] = {
        "a loop of forward passes": lambda: _forward(model, DynamicCache(config=config)),
        "a loop of forward passes, static cache": lambda: _forward(
            model, StaticCache(config, max_cache_len=PROMPT + TOKENS)
        ),
        "generate()": lambda: _generate(model),
        "generate(), static cache": lambda: _generate(model, cache_implementation="static", disable_compile=True),
    }
    turns: dict[str, list[float]] = {name: [] for name in loops}
    with torch.inference_mode():
        for _ in range(_TURNS):
            for name, loop in loops.items():
                turns[name].append(loop())
    least = {name: min(each) for name, each in turns.items()}
    fastest = min(list(least)[:2], key=least.__getitem__)
    name = f"LLaMA of {config.num_hidden_layers} layers of 1.1 B's, int4, a token"
    return [
        Result(
            f"{name}, {ours}",
            "the forward pass",
            least[ours] / least[fastest],
            1.1,
            times=(least[ours], least[fastest]),
        )
        for ours in list(least)[2:]
    ]


def _forward(model: Any, cache: Any) -> float:
    """Return the seconds of a token after the first, by the model's own call."""
    tokens = torch.arange(PROMPT)[None]
    for number in range(TOKENS):
        if number == 1:
            started = time.perf_counter()
        tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return (time.perf_counter() - started) / (TOKENS - 1)


def _generate(model: Any, **settings: Any) -> float:
    """Return the seconds of a token after the first, by generate()."""
    times, prompt = _Times(), torch.arange(PROMPT)[None]
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, streamer=times, **settings)
    return (times.at[-1] - times.at[1]) / (TOKENS - 1)
