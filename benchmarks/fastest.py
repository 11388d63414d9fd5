"""Recipe "fastest" beside the other ways to run a model: the scenarios, common models, and training steps.

`python -m benchmarks.fastest fastest` prints the peak memory of training steps; `Memory` runs it for two ways.
"""

import functools
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTModel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import polycast

from .apart import Apart
from .scenarios import SCENARIOS
from .timing import LongSide, Race, Ratio, Result, Several
from .ways import Case, Inference, Made, Training, Way, no_region

FLOAT32, TORCH, COPY, PLAIN, CACHED = "float32", "torch.autocast", "a bfloat16 copy", "a plain region", "WeightCache"
FLOAT32_AGAIN = "float32, in torch.autocast's process"
FASTEST, FASTEST_CACHED, INT8 = "fastest", "fastest, WeightCache", "int8"
_TRIES = 3
"""Measure a noisy profile at most so many times."""
NOT_SLOWER = 1.08
"""The bound on the recipe's time relative to the fastest other way: 1, and a margin for noise."""
_TRAINED = "GPT-2 of 6 layers, training step of 4 x 128 tokens"


def ways() -> dict[str, Way]:
    """Return all ways. The first one of each process is always timed. Ways with a cache share one, to save memory.

    torch.autocast runs in a process without polycast's kernels, with float32 beside it: ratios compare each way with
    float32 of its own process, and the two show how much processes differ. All other ways run in one process:
    polycast's kernels do not change ops outside of regions.

    The copy is made before casts are cached: copying a weight drops its cast, since it reads the weight's ``data``.

    Functions make the regions: functools.partial would add a third to the time of making one.
    """
    amp, cache = polycast.autocast, polycast.WeightCache()
    return {
        FLOAT32: Way(no_region, "polycast"),
        COPY: Way(no_region, "polycast", copied=True, trains=False, may_be_slow=True),
        FASTEST: Way(lambda *device: amp(*device, recipe="fastest"), "polycast"),
        FASTEST_CACHED: Way(lambda *device: amp(*device, recipe="fastest", cache=cache), "polycast", trains=False),
        INT8: Way(lambda *device: amp(*device, recipe="int8"), "polycast", trains=False),
        FLOAT32_AGAIN: Way(no_region, "torch"),
        TORCH: Way(torch.autocast, "torch", may_be_slow=True),
        PLAIN: Way(amp, "polycast", may_be_slow=True),
        CACHED: Way(lambda *device: amp(*device, cache=cache), "polycast", trains=False, may_be_slow=True),
    }


def gpt2(tokens: int, layers: int = 12, batch: int = 1) -> Made:
    """Return a GPT-2 of small layers, and a batch of tokens."""
    config = GPT2Config(n_layer=layers, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return GPT2LMHeadModel(config).eval(), torch.randint(1000, (batch, tokens))


def _gpt2_to_train() -> Made:
    return gpt2(128, layers=6, batch=4)


def bert(layers: int = 12, batch: int = 4) -> Made:
    """Return a BERT of base layers, and a batch of 128 tokens."""
    config = BertConfig(num_hidden_layers=layers, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    return BertModel(config).eval(), torch.randint(1000, (batch, 128))


def vit(batch: int = 2) -> Made:
    """Return a ViT base, and images."""
    return ViTModel(ViTConfig()).eval(), torch.randn(batch, 3, 224, 224)


def resnet(number: int, batch: int = 2) -> Made:
    """Return a ResNet of 18 or 50 layers, and images."""
    options: dict[int, dict[str, Any]] = {
        18: {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
        50: {},
    }
    return ResNetForImageClassification(ResNetConfig(**options[number])).eval(), torch.randn(batch, 3, 224, 224)


def llama(use_cache: bool = True, layers: int = 22) -> nn.Module:
    """Return a LLaMA of 1.1 billion random weights (TinyLlama's sizes), or of fewer layers."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=use_cache,
    )
    with torch.device("meta"):  # initializing a billion weights takes longer than the race
        model = LlamaForCausalLM(config)
    model.to_empty(device=torch.get_default_device())
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.02, 0.02)
    return model.eval()


def _llama() -> Made:
    """Return the LLaMA, and one token, at one position."""
    return llama(use_cache=False), torch.tensor([[464]])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that updates all weights in one kernel."""
    return torch.optim.AdamW(model.parameters(), fused=True)


def loss_of_logits(out: Any) -> torch.Tensor:
    """Return the loss of a language model's output, for the token 0 everywhere."""
    logits = out.logits
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), logits.new_zeros(logits[..., 0].numel(), dtype=torch.long)
    )


TRAINED = Training(_TRAINED, _gpt2_to_train, adamw, loss=loss_of_logits)
_GPT2, _TOKEN, _LLAMA = "GPT-2 small, 128 tokens", "GPT-2 small, 1 token", "LLaMA 1.1 B, 1 token"
_BERT, _VIT = "BERT base, 4 x 128 tokens", "ViT base, 2 images"
MODELS: tuple[Case, ...] = (
    Inference(_GPT2, functools.partial(gpt2, 128)),
    Inference(_TOKEN, functools.partial(gpt2, 1)),
    Inference(_LLAMA, _llama),
    Inference(_BERT, bert),
    Inference(_VIT, vit),
    *(Inference(f"ResNet-{number}, 2 images", functools.partial(resnet, number)) for number in (18, 50)),
    TRAINED,
    Training("BERT of 4 layers, training step of 4 x 128 tokens", functools.partial(bert, 4)),
    Training("ResNet-18, training step of 2 images", functools.partial(resnet, 18)),
)

_SLOW_COPY, _SLOW_TORCH = (COPY, FLOAT32, 1.0), (TORCH, FLOAT32, 1.0)
_SLOW_ROW = (COPY, FLOAT32, 0.85)
"""Bounds hold only where the first takes at least this part of the second's time: where torch's bfloat16 is slow. One
row reads half the bytes of float32, so 0.85 is slow."""
BOUNDS: Mapping[str, tuple[Ratio, ...]] = {
    what: tuple(
        Ratio(f"{what}, {ours}", against, ours, against, at_most, where) for ours, against, at_most, where in bounds
    )
    for what, bounds in {
        _GPT2: [(FASTEST, TORCH, 0.7, _SLOW_COPY)],
        _BERT: [(FASTEST, TORCH, 0.7, _SLOW_COPY)],
        _VIT: [(FASTEST, TORCH, 0.7, _SLOW_COPY)],
        _TOKEN: [(FASTEST_CACHED, COPY, 0.75, _SLOW_ROW), (INT8, COPY, 0.36, _SLOW_ROW)],
        _LLAMA: [(FASTEST_CACHED, COPY, 0.65, _SLOW_ROW), (INT8, COPY, 0.33, _SLOW_ROW)],
        _TRAINED: [(FASTEST, TORCH, 0.75, _SLOW_TORCH)],
    }.items()
}


def _race(case: Case, **options: Any) -> Race:
    all_ways = ways()
    sides = case.sides(all_ways, LongSide)
    others = "the fastest of float32, torch.autocast and a plain region"
    ratios = [
        *(
            Ratio(f"{case.what}, {ours}", others, ours, (FLOAT32, TORCH, PLAIN), NOT_SLOWER)
            for ours in (FASTEST, FASTEST_CACHED)
            if ours in sides
        ),
        *BOUNDS.get(case.what, ()),
        *(Ratio(f"{case.what}, {name}", FLOAT32, name, FLOAT32, None) for name in sides),
    ]
    bases = {name: FLOAT32_AGAIN if name == TORCH else FLOAT32 for name in sides if name != FLOAT32_AGAIN}
    return Race(ratios, sides=sides, bases=bases, **options)


def _all() -> Iterator[Race]:
    for case in SCENARIOS:
        yield _race(case, rounds=40, most_seconds=3, seconds=0.008)
    for case in MODELS:
        yield _race(case, rounds=16, most_seconds=5, seconds=0.025)


races = functools.partial(Several, _all)


def measure_profile(device_type: str) -> None:
    """Measure the profile with which the recipe chooses, again if it is noisy."""
    for _ in range(_TRIES):
        if not polycast.profile(device_type, refresh=True).is_noisy:
            return


@dataclass(frozen=True)
class Fastest:
    """All races, after a measurement of the profile with which the recipe chooses.

    Attributes:
        processes: the number of pairs of processes.
    """

    processes: int = 2

    def run(self, quick: bool) -> list[Result]:
        """Return the results of all races."""
        measure_profile("cpu")
        return Apart(f"{__name__}:races", least=True, processes=self.processes, keeps_memory=True).run(quick)


with_avx2 = functools.partial(Fastest, processes=1)
"""One pair only: some ways take minutes there."""


@dataclass(frozen=True)
class Memory:
    """The peak memory of training steps with the recipe, relative to torch's."""

    def run(self, quick: bool) -> list[Result]:
        """Return the result of a process of each library."""
        peaks = []
        for name in (FASTEST, TORCH):
            command = [sys.executable, "-m", __name__, name]
            peaks.append(int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        return [Result(f"{_TRAINED}, peak memory, {FASTEST}", TORCH, peaks[0] / peaks[1], 1.02)]


if __name__ == "__main__":
    _, step = TRAINED.functions(ways()[sys.argv[1]])
    for _ in range(3):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
