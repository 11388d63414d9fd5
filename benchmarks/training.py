"""The time and the peak memory of a training step of GPT-2 small: forward, backward and AdamW's step.

`python -m benchmarks.training polycast` is the process whose memory is measured.
"""

import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import polycast

from .timing import Race, Ratio, Side

_BATCH, _TOKENS, _STEPS = 1, 32, 2
_LIBRARIES = {"polycast": polycast, "torch": torch}


def _step(amp: Any) -> Callable[[], None]:
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False)
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(config.vocab_size, (_BATCH, _TOKENS))

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast("cpu"):
            logits = model(tokens).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def training() -> Race:
    sides = {name: Side("step()", {"step": _step(amp)}, kernels=name) for name, amp in _LIBRARIES.items()}
    what = f"GPT-2 small, training step of {_BATCH} x {_TOKENS} tokens"
    return Race(sides=sides, ratios=[Ratio(what, "torch.autocast", "polycast", "torch", 1.0)], rounds=5)


if __name__ == "__main__":
    step = _step(_LIBRARIES[sys.argv[1]])
    for _ in range(_STEPS):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
