"""A LLaMA with int4 weights as a server runs it: generate() beside a loop of forward passes, and requests at once."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import polycast

from .timing import Result

_PROMPT, _TOKENS, _TURNS = 16, 32, 4
_CLIENTS = (1, 4, 8)
_KEPT = ContinuousBatchingConfig(num_blocks=32, page_size=64, max_batch_tokens=256, use_cuda_graph=False)


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
    """The seconds of a token after a prompt in each loop, and the tokens a second of requests that arrive together."""

    def run(self, quick: bool) -> list[Result]:
        """Return the figures; with `quick`, those of two layers."""
        config = LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=2 if quick else 22,
            num_key_value_heads=4,
            eos_token_id=None,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        self._model: Any = LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)
        region = polycast.autocast("cpu", recipe="int4", cache=polycast.WeightCache())
        self._model.forward = region(self._model.forward)
        loops: dict[str, Callable[[], float]] = {
            "a loop of forward passes": lambda: self._forward(DynamicCache(config=config)),
            "a loop of forward passes, static cache": lambda: self._forward(
                StaticCache(config, max_cache_len=_PROMPT + _TOKENS)
            ),
            "generate()": self._generate,
            "generate(), static cache": lambda: self._generate(cache_implementation="static", disable_compile=True),
        }
        turns: dict[str, list[float]] = {name: [] for name in loops}
        with torch.inference_mode():
            for _ in range(_TURNS):
                for name, loop in loops.items():
                    turns[name].append(loop())
            batches = self._batches()
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
        ] + [
            Result(f"{name}, {count} requests at once", "-", speed, None, " tokens/s")
            for count, speed in zip(_CLIENTS, batches, strict=True)
        ]

    def _forward(self, cache: Any) -> float:
        tokens = torch.arange(_PROMPT)[None]
        for number in range(_TOKENS):
            if number == 1:
                started = time.perf_counter()
            tokens = self._model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        return (time.perf_counter() - started) / (_TOKENS - 1)

    def _generate(self, **settings: Any) -> float:
        times, prompt = _Times(), torch.arange(_PROMPT)[None]
        self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=_TOKENS, streamer=times, **settings
        )
        return (times.at[-1] - times.at[1]) / (_TOKENS - 1)

    def _batches(self) -> Sequence[float]:
        """Return the tokens a second of each number of requests, prompts included."""
        found = []
        config = GenerationConfig(max_new_tokens=_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with self._model.continuous_batching_context_manager(
            config, continuous_batching_config=_KEPT, warmup=False
        ) as manager:
            for count in _CLIENTS:
                speeds = []
                for _ in range(_TURNS):
                    started = time.perf_counter()
                    for number in range(count):
                        manager.add_request([number, *range(1, _PROMPT)], max_new_tokens=_TOKENS)
                    made = sum(len(manager.get_result(timeout=300).generated_tokens) for _ in range(count))
                    speeds.append(made / (time.perf_counter() - started))
                found.append(max(speeds))
        return found
