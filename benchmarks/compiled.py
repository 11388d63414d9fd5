"""Compiled models: a WeightCache in compiled code, against compiled torch.autocast and a compiled bfloat16 copy.

`python -m benchmarks.compiled polycast` is the process whose memory is measured.
"""

import copy
import resource
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import polycast
from polycast.engine.casts.cast_cache import caches_alive

from .once import NOT_SLOWER
from .timing import Race, Ratio, Result, Several, Side

_REGION = "with torch.no_grad(), autocast('cpu'): model(x)"
_CACHED = "with torch.no_grad(), autocast('cpu', cache=cache): model(x)"
_PLAIN = "with torch.no_grad(): model(x)"
_MICRO_BATCHES = 4


def _compiled(model: torch.nn.Module) -> Callable[..., Any]:
    """Return a compiled function that calls a model, with a code object of its own, by which Dynamo caches."""

    def forward(x: torch.Tensor) -> Any:
        return model(x)

    code = forward.__code__.replace(co_name=f"forward_{id(model)}")
    return torch.compile(types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__))


def _inference(what: str, model: torch.nn.Module, x: torch.Tensor, to_copy: float | None, to_torch: float) -> Race:
    """Return a race of a cache and torch's region; with `to_copy` also of a bfloat16 copy and of float32."""
    names = {"torch": torch, "x": x}

    def side(statement: str, model: torch.nn.Module, kernels: str = "torch", **more: Any) -> Side:
        return Side(statement, {**names, "model": _compiled(model), **more}, kernels=kernels)

    sides = {
        "torch": side(_REGION, copy.deepcopy(model), autocast=torch.autocast),
        "cached": side(_CACHED, model, "polycast", autocast=polycast.autocast, cache=polycast.WeightCache()),
    }
    what += ", WeightCache"
    ratios = [Ratio(what, "compiled torch", "cached", "torch", to_torch)]
    if to_copy is not None:
        x_of_copy = x.bfloat16() if x.is_floating_point() else x
        sides["copy"] = side(_PLAIN, copy.deepcopy(model).bfloat16(), x=x_of_copy)
        sides["float32"] = side(_PLAIN, copy.deepcopy(model))
        ratios += [
            Ratio(what, "compiled bfloat16", "cached", "copy", to_copy),
            Ratio(what, "compiled float32", "cached", "float32", None),
        ]
    return Race(sides=sides, ratios=ratios, rounds=15, most_seconds=6, seconds=0.05)


def _gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return GPT2LMHeadModel(config).eval()


def _all() -> Iterator[Race]:
    linears = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
    for batch in (1, 128):
        yield _inference(f"8 x Linear(2048, 2048), batch {batch}", linears, torch.randn(batch, 2048), 1.08, NOT_SLOWER)
    yield _inference("GPT-2 small, 1 token", _gpt2(), torch.tensor([[464]]), 1.1, 0.45)
    yield _inference("BERT, 8 x 128", BertModel(BertConfig()).eval(), torch.randint(1000, (8, 128)), None, NOT_SLOWER)


def _step(library: str, micro_batches: int) -> Callable[[], None]:
    model = _gpt2()
    model.train()
    compiled = _compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tokens = torch.randint(1000, (micro_batches, 1, 64))
    settings = {"cache": polycast.WeightCache()} if library == "cached" else {}
    autocast: Any = torch.autocast if library == "torch" else polycast.autocast

    def step() -> None:
        optimizer.zero_grad()
        for each in tokens:
            with autocast("cpu", **settings):
                logits = compiled(each).logits
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), each[:, 1:].flatten())
            loss.backward()
        optimizer.step()

    return step


def _steps() -> Iterator[Race]:
    for micro_batches in (1, _MICRO_BATCHES):
        sides = {
            library: Side(
                "step()",
                {"step": _step(library, micro_batches)},
                kernels="torch" if library == "torch" else "polycast",
            )
            for library in ("torch", "plain", "cached")
        }
        what = f"GPT-2 small, compiled step of {micro_batches} x 1 x 64"
        ratios = [
            Ratio(f"{what}, plain region", "compiled torch.autocast", "plain", "torch", NOT_SLOWER),
            Ratio(f"{what}, WeightCache", "compiled torch.autocast", "cached", "torch", NOT_SLOWER),
        ]
        yield Race(sides=sides, ratios=ratios, rounds=9, seconds=0.05)


@dataclass(frozen=True)
class Memory:
    """The peak memory of compiled training steps relative to torch's, without the memory of the cache."""

    def run(self, quick: bool) -> list[Result]:
        """Return the results of a process of each library."""
        peaks = {}
        for library in ("torch", "plain", "cached"):
            command = [sys.executable, "-m", "benchmarks.compiled", library]
            peaks[library] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        what = "GPT-2 small, compiled step of 1 x 1 x 64, peak memory"
        return [
            Result(f"{what}, plain region", "compiled torch.autocast", peaks["plain"] / peaks["torch"], NOT_SLOWER),
            Result(f"{what}, less the cache", "compiled torch.autocast", peaks["cached"] / peaks["torch"], NOT_SLOWER),
        ]


def inference() -> Several:
    return Several(_all)


def training() -> Several:
    return Several(_steps)


if __name__ == "__main__":
    step = _step(sys.argv[1], 1)
    for _ in range(3):
        step()
    cached = sum(cache.stats().bytes for cache in caches_alive.values())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - cached)
