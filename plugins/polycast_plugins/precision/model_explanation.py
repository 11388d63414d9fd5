"""The result of ``explain`` for a model: a value that prints as a table and converts to plain data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polycast.plugin import Recipe, Result, dtype_name

SCHEMA = 1
"""The schema of :meth:`ModelExplanation.to_dict`."""


@dataclass(frozen=True)
class ModuleExplanation(Result):
    """The dtypes of a module that runs ops itself, or has a rule.

    Attributes:
        name: its name in the model; empty for the model itself.
        kind: its class.
        calls: the number of its calls.
        rule: the rule of :func:`polycast.apply_policy` that applies to it: its own, or that of the innermost module
            around it; empty if there is none.
        weights: the dtypes of its own floating-point parameters.
        compute: by what its ops compute in, the number of ops: a dtype, such as ``"bfloat16"``, or a recipe, such as
            ``"int8"``. Casts, views, and ops on integers do not count.
        output: the dtypes of the floating-point tensors that it returns.
        declined: why the recipe does not compute ops of this module, by op.
    """

    name: str
    kind: str
    calls: int
    rule: str
    weights: tuple[torch.dtype, ...]
    compute: Mapping[str, int]
    output: tuple[torch.dtype, ...]
    declined: Mapping[str, str]


@dataclass(frozen=True)
class ModelExplanation(Result):
    """The effect of autocast on the modules of a model. ``print`` and notebooks show a table.

    Attributes:
        device_type, dtype: the device and the dtype of the region.
        recipe: the recipe of the region, if it has one.
        modules: the modules that run ops themselves or have a rule, in the order of their first calls.
    """

    device_type: str
    dtype: torch.dtype
    recipe: Recipe | None
    modules: tuple[ModuleExplanation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data for JSON."""
        return {"schema": SCHEMA, "torch": torch.__version__, **super().to_dict()}

    def tables(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Yield the table of modules."""
        has_rules = any(each.rule for each in self.modules)
        columns = ("module", "class", "weights", "computes in", "returns", *(["rule"] if has_rules else []))
        yield columns, [row[: len(columns)] for row in self._rows()]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for each in self.modules:
            compute = ", ".join(each.compute) or "-"
            yield each.name or "(model)", each.kind, _names(each.weights), compute, _names(each.output), each.rule

    def lines(self) -> list[str]:
        """Return the region, and what its recipe declines."""
        recipe = "" if self.recipe is None else f" and {self.recipe.short}"
        reasons: dict[str, list[str]] = {}
        for each in self.modules:
            for op, reason in each.declined.items():
                reasons.setdefault(f"{op.removeprefix('aten::')}: {reason}", []).append(each.name or "(model)")
        declined = [f"Declined in {_some(names)}: {what}" for what, names in reasons.items()]
        return [f"In a region of {dtype_name(self.dtype)}{recipe} on {self.device_type}.", *declined]


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(dtype_name, dtypes)) or "-"


def _some(names: list[str]) -> str:
    others = f" and {len(names) - 3} other modules" if len(names) > 4 else ""
    return ", ".join(names[:3] if others else names) + others
