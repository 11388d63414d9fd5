"""The overhead of observing: per op, in a training step, and afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import polycast

from .timing import Race, Ratio, Side

LAYERS, _TOKENS, _VOCABULARY = 4, 64, 1000


def _region(observed: bool) -> Any:
    @contextmanager
    def around() -> Iterator[None]:
        with torch.no_grad(), polycast.autocast("cpu"):
            if not observed:
                yield
                return
            with polycast.observe():
                yield

    return around


def _once_observed() -> Any:
    """Return a region on a thread that was observed before, which must cost nothing."""

    @contextmanager
    def around() -> Iterator[None]:
        with polycast.observe():
            torch.ones(1)
        with torch.no_grad(), polycast.autocast("cpu"):
            yield

    return around


def ops() -> Race:
    x = torch.randn(8, 8)
    names = {"torch": torch, "x": x, "y": x.clone(), "narrow": x.bfloat16()}
    statements = {
        "8x8 mm, float32 inputs": "torch.mm(x, y)",
        "8x8 mm, bfloat16 inputs": "torch.mm(narrow, narrow)",
        "an op without a policy (relu)": "torch.relu(x)",
    }
    sides, ratios = {}, []
    for what, statement in statements.items():
        plain, after, on = f"{what}: plain", f"{what}: after", f"{what}: on"
        sides[plain] = Side(statement, names, _region(observed=False))
        sides[after] = Side(statement, names, _once_observed())
        sides[on] = Side(statement, names, _region(observed=True))
        ratios.append(Ratio(f"{what}, observed", "not observed", on, plain, 2.0))
        ratios.append(Ratio(f"{what}, no longer observed", "never observed", after, plain, 1.01))
    return Race(sides=sides, ratios=ratios)


def training_step(width: int) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Return a GPT-2, and a function that trains it for a step."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=width,
        n_head=max(1, width // 64),
        vocab_size=_VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(_VOCABULARY, (1, _TOKENS))

    def step() -> None:
        with polycast.autocast("cpu"):
            logits = model(tokens).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def training() -> Race:
    sides, ratios = {}, []
    for width, at_most in ((64, 1.3), (768, 1.06)):
        model, step = training_step(width)
        sides[f"{width}"] = Side("step()", {"step": step})
        sides[f"{width}, observed"] = Side("step()", {"step": step}, _observing(model))
        what = f"GPT-2 of {LAYERS} layers, width {width}, training step, observed"
        ratios.append(Ratio(what, "not observed", f"{width}, observed", f"{width}", at_most))
    return Race(sides=sides, ratios=ratios, rounds=20, seconds=0.2)


def _observing(model: torch.nn.Module) -> Any:
    return lambda: polycast.observe(model)
