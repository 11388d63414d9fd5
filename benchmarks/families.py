"""Many families of models in int8 and int4: what recipes compute of them, how exactly, and in what time.

`python -m benchmarks.families BERT` runs the families whose names contain the text.
"""

import copy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import polycast
from polycast_plugins.observe import Observation

from .family_models import FAMILIES, Family, Inputs
from .scores import Scores
from .timing import LongSide, Race, Ratio, Result, Skipped

FLOAT32, COPY, INT8, INT4 = "float32", "a bfloat16 copy", "int8", "int4"
SHARE, ERROR = "share of FLOPs", "error relative to bfloat16's"
_CONVOLUTIONS = ("conv1d", "conv2d")
_SMALL = 4096
_NAMES = {
    "its groups have fewer than 48 channels": "depthwise or narrow groups",
    "the weight is smaller than the recipe's min_size": "small weights",
}
"""Names in the table for products that a recipe declines, by reason."""
_FEWEST = 0.01


@dataclass(frozen=True)
class Families:
    """The scores and the times of all families.

    Attributes:
        families: the families.
    """

    families: tuple[Family, ...] = FAMILIES

    def run(self, quick: bool) -> list[Result | Scores]:
        """Return the scores and times of all families."""
        return [figure for family in self.families for figure in _figures(family, quick)]


def _recipes(family: Family) -> dict[str, polycast.plugin.Recipe]:
    int8, int4 = polycast.Int8(), polycast.Int4()
    if family.convolves:  # small weights, multiplied by many pixels
        int8 = int8.with_options(ops=(*int8.ops, *_CONVOLUTIONS), min_size=_SMALL)
        int4 = int4.with_options(min_size=_SMALL)
    return {INT8: int8, INT4: int4}


def _ratios(what: str) -> list[Ratio]:
    pairs = [(COPY, FLOAT32), (INT8, FLOAT32), (INT4, FLOAT32), (INT8, COPY), (INT4, COPY)]
    return [Ratio(f"{what}, {ours}", theirs, ours, theirs, None) for ours, theirs in pairs]


def _figures(family: Family, quick: bool) -> Iterable[Result | Scores]:
    recipes = _recipes(family)
    few, many = family.sizes
    backend = polycast.plugin.get_backend("cpu")
    reason = next(
        (found.reason for each in recipes.values() if not (found := polycast.plugin.check(backend, each))), ""
    )
    if reason:
        yield from (Scores(family.what(many), metric, "", skipped=reason) for metric in (SHARE, ERROR))
        for size in (few, many):
            yield from Skipped(_ratios(family.what(size)), reason).run(quick)
        return
    torch.manual_seed(0)
    model = family.make().eval().requires_grad_(False)
    inputs = {size: family.inputs(size) for size in (few, many)}
    yield _shares(family, model, inputs[many], recipes)
    yield _errors(family, model, inputs[many], recipes)
    copied = copy.deepcopy(model).bfloat16()
    for size, each in inputs.items():
        yield from _race(family.what(size), model, copied, each, recipes).run(quick)


def _shares(family: Family, model: nn.Module, inputs: Inputs, recipes: Mapping[str, polycast.plugin.Recipe]) -> Scores:
    shares: dict[str, float] = {}
    rest: dict[str, float] = {}
    for name, recipe in recipes.items():
        with polycast.observe(model) as seen, torch.no_grad(), polycast.autocast("cpu", recipe=recipe):
            model(**inputs)
        shares[name] = seen.recipe_share or 0.0
        if name == INT8:
            rest = _rest(seen)
    total = sum(each.flops for each in seen.matmuls)
    large = {name: flops / total for name, flops in rest.items() if flops >= _FEWEST * total}
    ordered = sorted(large.items(), key=lambda item: -item[1])
    note = ", ".join(f"{name} {share:.0%}" for name, share in ordered)
    return Scores(family.what(family.sizes[1]), SHARE, "", shares, note=note)


def _rest(seen: Observation) -> dict[str, float]:
    """Return the floating-point operations that a recipe did not compute, by what they are."""
    rest: dict[str, float] = {}
    for each in seen.matmuls:
        if each.recipe and not each.declined:
            continue
        op = each.op.removeprefix("aten::")
        of_activations = "bmm" in op or "attention" in op or "not a weight" in each.declined
        name = "products of activations" if of_activations else _NAMES.get(each.declined, op)
        rest[name] = rest.get(name, 0.0) + each.flops
    return rest


def _errors(family: Family, model: nn.Module, inputs: Inputs, recipes: Mapping[str, polycast.plugin.Recipe]) -> Scores:
    with torch.no_grad():
        expected = model(**inputs)[0]
        found: dict[str, float] = {}
        for name, recipe in {"bfloat16": "none", **recipes}.items():
            with polycast.autocast("cpu", recipe=recipe):
                found[name] = (model(**inputs)[0].float() - expected).norm().item()
    by = {name: found[name] / found["bfloat16"] for name in recipes}
    return Scores(family.what(family.sizes[1]), ERROR, "", by)


def _race(
    what: str, model: nn.Module, copied: nn.Module, inputs: Inputs, recipes: Mapping[str, polycast.plugin.Recipe]
) -> Race:
    names: dict[str, Any] = {"torch": torch, "autocast": polycast.autocast, "model": model, "inputs": inputs}
    plain = "with torch.no_grad(): model(**inputs)"
    sides = {
        name: LongSide(
            "with torch.no_grad(), autocast('cpu', recipe=recipe): model(**inputs)", {**names, "recipe": recipe}
        )
        for name, recipe in recipes.items()
    }
    sides[COPY] = LongSide(plain, {**names, "model": copied, "inputs": _narrow(inputs)})
    sides[FLOAT32] = LongSide(plain, names)
    return Race(_ratios(what), sides=sides, rounds=9, most_seconds=2.5, seconds=0.02, least=True)


def _narrow(inputs: Inputs) -> Inputs:
    def narrow(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(narrow, value))
        return value.bfloat16() if value.is_floating_point() else value

    return {name: narrow(value) for name, value in inputs.items()}


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for figure in Families(tuple(each for each in FAMILIES if any(part in each.name for part in wanted))).run(
        quick=True
    ):
        print(figure)
