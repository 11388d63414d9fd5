"""Models with weights in 4 bits, against a bfloat16 copy and int8, for one token and for many."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import polycast

from .fastest import llama
from .timing import LongSide, Race, Ratio, Several, Skipped

COPY, INT8, INT4 = "a bfloat16 copy", "int8", "int4"
_MANY_THREADS = 3
"""One token takes the time that reading the weights takes, if so many threads read them."""


@dataclass(frozen=True)
class _Case:
    """A model, the lengths of its inputs, and the bound of a token's time relative to a bfloat16 copy."""

    what: str
    at_most: float
    make: Callable[[], nn.Module]
    lengths: tuple[int, ...]


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()


CASES = (
    _Case("GPT-2 small", 0.32, _gpt2, (1, 128)),
    _Case("LLaMA 1.1 B", 0.28, functools.partial(llama, use_cache=False), (1, 128)),
)


def _ratios(case: _Case, tokens: int) -> list[Ratio]:
    what = f"{case.what}, {tokens} token{'s' if tokens > 1 else ''}, {INT4}"
    many = torch.get_num_threads() >= _MANY_THREADS
    against_copy = case.at_most if tokens == 1 and many else None
    against_int8 = 1.05 if tokens > 1 else 1.0
    return [Ratio(what, COPY, INT4, COPY, against_copy), Ratio(what, INT8, INT4, INT8, against_int8)]


def _all() -> Iterator[Race | Skipped]:
    answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
    for case in CASES:
        if not answer.available:
            yield Skipped([ratio for tokens in case.lengths for ratio in _ratios(case, tokens)], answer.reason)
            continue
        torch.manual_seed(0)
        model = case.make().requires_grad_(False)
        copied = copy.deepcopy(model).bfloat16()
        cache = polycast.WeightCache()  # of this model: it is freed before the next one is made
        region = "with torch.no_grad(), autocast('cpu', recipe=recipe, cache=cache): model(x)"
        for tokens in case.lengths:
            names = {"torch": torch, "x": torch.randint(1000, (1, tokens)), "autocast": polycast.autocast}
            in_region = {**names, "model": model, "cache": cache}
            sides = {
                INT4: LongSide(region, {**in_region, "recipe": INT4}),
                INT8: LongSide(region, {**in_region, "recipe": INT8}),
                COPY: LongSide("with torch.no_grad(): model(x)", {**names, "model": copied}),
            }
            yield Race(_ratios(case, tokens), sides=sides, rounds=12, most_seconds=10, seconds=0.05)


races = functools.partial(Several, _all)
