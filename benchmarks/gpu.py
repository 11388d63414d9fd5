"""Ops, models and training steps on a GPU, in regions and by recipe, against torch.autocast, a float16 copy, float32.

torch's timer waits for the device before and after each turn. All ways run in one process: launching kernels takes most
of the time of many models, and the speed of that differs by up to a half between processes. Without a GPU there are no
figures.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import polycast

from .fastest import NOT_SLOWER as AS_FAST_AS_OTHERS
from .fastest import adamw, bert, gpt2, llama, loss_of_logits, measure_profile, resnet, vit
from .once import NOT_SLOWER
from .scenarios import MODELS
from .timing import Race, Ratio, Result, Side, Skipped
from .ways import Case, Inference, Made, Training, Way, no_region

FLOAT32, TORCH, COPY, PLAIN, CACHED = "float32", "torch.autocast", "a float16 copy", "a plain region", "WeightCache"
FASTEST, FASTEST_CACHED, FLOAT8 = "fastest", "fastest, WeightCache", "float8"
DEVICE = "cuda"
_LAUNCHED = "20 x", "24 small layers", "1 token"
"""Parts of the names of cases in which launching kernels takes most of the time. A region also launches a conversion of
each result, and the recipe "fastest" keeps the dtypes of results, so neither can be as fast as float32."""
_IN_FLOAT8 = "LLaMA"
"""Only its weights are large enough for the recipe float8 to compute with them in float8."""


def ways() -> dict[str, Way]:
    """Return all ways, in the device's default dtype. float8 is one of them if the GPU supports it."""
    amp, cache, packed = polycast.autocast, polycast.WeightCache(), polycast.WeightCache()
    float8 = Way(lambda *device: amp(*device, recipe="float8", cache=packed), "polycast", trains=False)
    return {
        PLAIN: Way(amp, "polycast"),
        CACHED: Way(lambda *device: amp(*device, cache=cache), "polycast", trains=False),
        FASTEST: Way(lambda *device: amp(*device, recipe="fastest"), "polycast"),
        FASTEST_CACHED: Way(lambda *device: amp(*device, recipe="fastest", cache=cache), "polycast", trains=False),
        COPY: Way(no_region, "polycast", copied=True, trains=False),
        **({FLOAT8: float8} if polycast.plugin.check(polycast.plugin.get_backend(DEVICE), polycast.Float8()) else {}),
        TORCH: Way(torch.autocast, "torch"),
        FLOAT32: Way(no_region, "polycast"),
    }


def _on_gpu(make: Callable[[], Made]) -> Made:
    with torch.device(DEVICE):
        return make()


def _inference(what: str, make: Callable[..., Made], *sizes: int, **options: Any) -> Inference:
    return Inference(what, functools.partial(_on_gpu, functools.partial(make, *sizes, **options)), dtype=torch.float16)


def _training(what: str, make: Callable[..., Made], *sizes: int, batch: int, **options: Any) -> Training:
    return Training(what, functools.partial(_on_gpu, functools.partial(make, *sizes, batch=batch)), adamw, **options)


def _llama(tokens: int) -> Made:
    return llama(use_cache=False), torch.randint(1000, (1, tokens))


def _op(name: str, size: int, weight: bool) -> Made:
    """Return a module that calls an op twenty times, so that entering the region does not dominate."""
    call = getattr(torch, name)
    other = torch.randn(size, size)

    class Calls(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Parameter(other) if weight else torch.nn.Buffer(other)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                out: torch.Tensor = call(x, self.other)
            return out

    return Calls(), torch.randn(size, size)


CASES: Sequence[Case] = (
    _inference("20 x mm of 64 x 64", _op, name="mm", size=64, weight=False),
    _inference("20 x mm of 64 x 64, with a weight", _op, name="mm", size=64, weight=True),
    _inference("20 x add of 64 x 64, without a policy", _op, name="add", size=64, weight=False),
    _inference("24 small layers", MODELS["24 small layers"]),
    _inference("GPT-2 small, 1 token", gpt2, 1),
    _inference("GPT-2 small, 8 x 512 tokens", gpt2, 512, batch=8),
    _inference("LLaMA 1.1 B, 1 token", _llama, 1),
    _inference("LLaMA 1.1 B, 2,048 tokens", _llama, 2048),
    _inference("BERT base, 32 x 128 tokens", bert, batch=32),
    _inference("ViT base, 32 images", vit, batch=32),
    _inference("ResNet-50, 32 images", resnet, 50, batch=32),
    _training("GPT-2 small, training step of 8 x 512 tokens", gpt2, 512, batch=8, loss=loss_of_logits),
    _training("BERT base, training step of 32 x 128 tokens", bert, batch=32),
    _training("ResNet-50, training step of 64 images", resnet, 50, batch=64),
)


def _ratios(case: Case, sides: Sequence[str]) -> list[Ratio]:
    fastest = "the fastest of float32, torch.autocast and a plain region"
    as_others = None if any(part in case.what for part in _LAUNCHED) else AS_FAST_AS_OTHERS
    bounds: list[tuple[str, str, Sequence[str], float | None]] = [
        (PLAIN, TORCH, (TORCH,), NOT_SLOWER),
        (CACHED, TORCH, (TORCH,), NOT_SLOWER),
        (CACHED, COPY, (COPY,), None),
        (FASTEST, fastest, (FLOAT32, TORCH, PLAIN), as_others),
        (FASTEST_CACHED, fastest, (FLOAT32, TORCH, PLAIN), as_others),
        (FLOAT8, COPY, (COPY,), None),
        (PLAIN, FLOAT32, (FLOAT32,), None),
    ]
    return [
        Ratio(f"{case.what}, {ours}", against, ours, theirs, at_most)
        for ours, against, theirs, at_most in bounds
        if {ours, *theirs} <= set(sides)
    ]


def _peak(side: Side) -> int:
    """Return the bytes that a call allocates at its peak, besides what it found: a step finds the last gradients."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    side.time(1)
    return torch.cuda.max_memory_allocated() - before


def _results(quick: bool) -> Iterator[Result]:
    for case in CASES:
        sides = case.sides({name: way for name, way in ways().items() if name != FLOAT8 or _IN_FLOAT8 in case.what})
        race = Race(_ratios(case, list(sides)), sides=sides, rounds=24, most_seconds=6, seconds=0.03, least=True)
        yield from race.run(quick)
        if isinstance(case, Training):
            peaks = {name: _peak(sides[name]) for name in (PLAIN, FASTEST, TORCH)}
            for name in (PLAIN, FASTEST):
                ratio = peaks[name] / peaks[TORCH]
                yield Result(f"{case.what}, peak memory, {name}", TORCH, ratio, NOT_SLOWER, sides=(name, TORCH))
        del race, sides
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Gpu:
    """The benchmark ``gpu``: all races, on the first GPU."""

    def run(self, quick: bool) -> list[Result]:
        """Return the results, without figures if there is no GPU."""
        available = polycast.plugin.get_backend(DEVICE).availability()
        if not available:
            bounded = [ratio for case in CASES for ratio in _ratios(case, (PLAIN, TORCH))]
            return Skipped(bounded, available.reason).run(quick)
        measure_profile(DEVICE)
        return list(_results(quick))
