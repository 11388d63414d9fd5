"""Models with int8 matmuls, against a bfloat16 copy, float32, and torchao's int8."""

import copy
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

import polycast

from .timing import Race, Ratio, Result, Several, Side, Skipped

_REGION = "with torch.no_grad(), autocast('cpu', recipe=recipe): model(x)"
_PLAIN = "with torch.no_grad(): model(x)"
_INT8 = polycast.Int8()
_WITH_CONVOLUTIONS = polycast.Int8("tensor", ops=("addmm", "conv2d", "linear", "matmul", "mm"))


@dataclass(frozen=True)
class _Case:
    """A model with its inputs, and the bounds of its time relative to a bfloat16 copy and to `torchao`."""

    what: str
    at_most: float
    make: Callable[[], tuple[nn.Module, torch.Tensor]]
    recipe: polycast.plugin.Recipe = _INT8
    torchao: float | None = 0.5


def _linears(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))), torch.randn(batch, 2048)


def _gpt2(tokens: int) -> tuple[nn.Module, torch.Tensor]:
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), torch.randint(1000, (1, tokens))


def _bert() -> tuple[nn.Module, torch.Tensor]:
    return BertModel(BertConfig()), torch.randint(1000, (8, 128))


def _resnet18() -> tuple[nn.Module, torch.Tensor]:
    config = ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    return ResNetForImageClassification(config), torch.randn(2, 3, 224, 224)


_BATCHES = {1: 0.35, 32: 0.6, 128: 0.6, 1024: 0.62}
CASES = (
    *(
        _Case(f"8 x Linear(2048, 2048), batch {batch}", at_most, functools.partial(_linears, batch))
        for batch, at_most in _BATCHES.items()
    ),
    _Case("GPT-2 small, 1 token", 0.5, functools.partial(_gpt2, 1)),
    _Case("GPT-2 small, prefill of 128", 0.72, functools.partial(_gpt2, 128)),
    _Case("GPT-2 small, prefill of 512", 0.88, functools.partial(_gpt2, 512)),
    _Case("BERT base, 8 x 128", 0.78, _bert),
    _Case("ResNet-18, batch 2, with conv2d", 0.9, _resnet18, _WITH_CONVOLUTIONS, torchao=None),
)


def _missing() -> tuple[str | None, str | None]:
    """Return the reasons why int8, and torchao's int8, cannot be measured here, or None."""
    answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), _INT8)
    ours = None if answer.available else answer.reason
    theirs = None if importlib.util.find_spec("torchao") else "torchao is not installed"
    return ours, ours or theirs


def _copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).bfloat16()


def _torchaos(model: nn.Module) -> nn.Module:
    """Return a bfloat16 copy with torchao's int8 linears, which quantize activations at each call."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = _copy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return quantized


def _side(model: Any, x: torch.Tensor, recipe: polycast.plugin.Recipe | None = None) -> Side:
    """Return a side on polycast's kernels, which stay installed, so that prepacked weights stay cached."""
    names: Mapping[str, Any] = {"torch": torch, "model": model, "x": x}
    if recipe is None:
        return Side(_PLAIN, names)
    return Side(_REGION, {**names, "autocast": polycast.autocast, "recipe": recipe})


def _narrow(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16() if x.is_floating_point() else x


def _eager(case: _Case) -> Iterator[Race | Skipped]:
    ours_missing, theirs_missing = _missing()
    always = [
        Ratio(f"{case.what}, int8", "a bfloat16 copy", "int8", "copy", case.at_most),
        Ratio(f"{case.what}, int8", "float32", "int8", "float32", None),
    ]
    against_torchao = (
        [] if case.torchao is None else [Ratio(f"{case.what}, int8", "torchao's int8", "int8", "torchao", case.torchao)]
    )
    if ours_missing is not None:
        yield Skipped((*always, *against_torchao), ours_missing)
        return
    torch.manual_seed(0)
    model, x = case.make()
    model.eval().requires_grad_(False)
    sides = {
        "int8": _side(model, x, case.recipe),
        "copy": _side(_copy(model), _narrow(x)),
        "float32": _side(model, x),
    }
    if theirs_missing is None and against_torchao:
        sides["torchao"] = _side(_torchaos(model), _narrow(x))
        yield Race(sides=sides, ratios=[*always, *against_torchao], rounds=12, most_seconds=6, seconds=0.05)
    else:
        yield Race(sides=sides, ratios=always, rounds=12, most_seconds=6, seconds=0.05)
        yield Skipped(tuple(against_torchao), theirs_missing or "")


def _all() -> Iterator[Race | Skipped]:
    for case in CASES:
        yield from _eager(case)


def _compiled(model: nn.Module, **options: Any) -> Callable[[torch.Tensor], Any]:
    """Return a compiled function that calls a model, with a code object of its own, by which Dynamo caches."""

    def forward(x: torch.Tensor) -> Any:
        return model(x)

    code = forward.__code__.replace(co_name=f"forward_{id(model)}")
    function = types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
    return torch.compile(function, dynamic=False, options=options)


def _all_compiled() -> Iterator[Race | Skipped]:
    missing, missing_torchao = _missing()
    for batch in _BATCHES:
        what = f"8 x Linear(2048, 2048), batch {batch}, int8, compiled"
        ratio = Ratio(what, "torchao's, frozen", "int8", "torchao", 1.0)
        if missing or missing_torchao:
            yield Skipped((ratio,), missing or missing_torchao or "")
            continue
        torch.manual_seed(0)
        model, x = _linears(batch)
        model.requires_grad_(False)
        torchaos = _compiled(_torchaos(model), freezing=True)
        sides = {
            "int8": _side(_compiled(model), x, _INT8),
            "torchao": _side(torchaos, _narrow(x)),
        }
        yield Race(sides=sides, ratios=[ratio], rounds=12, seconds=0.05)


@dataclass(frozen=True)
class Call:
    """The microseconds of a short call that a recipe computes: how long the op takes to reach the product."""

    rounds: int = 40

    def run(self, quick: bool) -> list[Result]:
        """Return the least of all rounds."""
        what, unit, missing = "F.linear of 256 x 256 by one row, int8", " µs", _missing()[0]
        if missing is not None:
            return [Result(what, "-", None, _CALL_AT_MOST, unit=unit, skipped=missing)]
        layer = nn.Linear(256, 256)
        names = {"linear": nn.functional.linear, "x": torch.randn(1, 256), "weight": layer.weight, "bias": layer.bias}

        @contextmanager
        def region() -> Iterator[None]:
            with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8(min_size=1)):
                yield

        side = Side("linear(x, weight, bias)", names, region)
        reason = _why_declined(functools.partial(layer, names["x"]), region)
        if reason:
            return [Result(what, "-", None, _CALL_AT_MOST, unit=unit, skipped=f"int8 does not compute it: {reason}")]
        least = min(side.time(1000) for _ in range(self.rounds // 5 if quick else self.rounds))
        return [Result(what, "-", least * 1e6, _CALL_AT_MOST, unit=unit)]


def _why_declined(call: Callable[[], object], region: Callable[[], AbstractContextManager[None]]) -> str:
    """Return why int8 does not compute the matmul of a call in a region; empty if it does."""
    with polycast.observe() as seen, region():
        call()
    computed = [each for each in seen.matmuls if each.recipe == "int8" and not each.declined]
    return "" if computed else ", ".join(each.declined for each in seen.matmuls) or "there is no matmul"


_CALL_AT_MOST = 4.0

eager = functools.partial(Several, _all)
compiled = functools.partial(Several, _all_compiled)
