"""The recipes to test, and the reference for their kernels: the float64 product, and a bound of the rounding error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from polycast.plugin import Backend, LowBitKernel, Recipe, all_recipes, check, find_op


def recipes() -> dict[str, Recipe]:
    """Return the recipes that need kernels, by the names that test ids and files of expected failures have.

    They are those of all known kinds, and of each word that their names may have, as in ``"int8:tensor"``.
    """
    found = {}
    for recipe in all_recipes():
        words = [{name: word} for name, words in recipe.named_settings().items() for word in words]
        for each in [recipe, *(recipe.with_options(**word) for word in words)] if recipe.needs_kernels else ():
            found[each.short] = for_any_size(each)
    return found


def for_any_size(recipe: Recipe, **options: Any) -> Recipe:
    """Return a recipe with other options, those of them that are its settings, for weights of any size."""
    options["min_size"] = 0
    return recipe.with_options(**{name: value for name, value in options.items() if name in recipe.settings})


def offered_recipes(backend: Backend) -> list[str]:
    """Return the names of the recipes that a device supports now."""
    return [name for name, recipe in recipes().items() if check(backend, recipe)]


@dataclass(frozen=True)
class LinearOp:
    """An op that is linear in its activations and in its weight.

    Attributes:
        op: its name in the dispatcher.
        features: the dimension of the weight that holds the output features.
        added: the position of the bias; None: it has none.
        activations: their position.
        weight: its position.
        rows: whether a row of the activations (their last dimension) makes a row of the output.
    """

    op: str
    features: int
    added: int | None = None
    activations: int = 0
    weight: int = 1
    rows: bool = True

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        """Call the op with all arguments, in the order of its schema."""
        with torch.no_grad():
            return call_op(self.op, args)

    def within(self, recipe: Recipe, args: Sequence[Any], *, random: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the op's result in float64, and the error bound of a recipe.

        Values x' = x + dx and w' = w + dw give x'w' - xw = dx w + x dw + dx dw. The op of the magnitudes bounds it, and
        allows almost anything in 4 bits. For random values the bound is a multiple of the standard deviation.

        Raises:
            Skipped: the recipe does not say how far it rounds.
        """
        exact = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
        x, weight = exact[self.activations], exact[self.weight]
        features_first = weight.movedim(self.features, 0)
        rows = x.flatten(0, -2) if self.rows and x.dim() > 1 else x.reshape(1, -1)
        says = getattr(recipe, "rounding_errors", None)
        errors = None if says is None else says(rows, features_first.flatten(1))
        if errors is None:
            pytest.skip(f"{type(recipe).__name__} does not say how far it rounds: define rounding_errors()")
        dx, dw = errors[0].reshape(x.shape), errors[1].reshape(features_first.shape).movedim(0, self.features)
        if not random:
            return self(exact), self._sum_of_products(exact, dx, dw, power=1)
        return self(exact), _DEVIATIONS * self._sum_of_products(exact, dx, dw, power=2).sqrt()

    def _sum_of_products(self, exact: Sequence[Any], dx: torch.Tensor, dw: torch.Tensor, power: int) -> torch.Tensor:
        """Return the op of the powers of ``dx w``, ``x dw`` and ``dx dw``, added up."""
        x, weight = exact[self.activations].abs(), exact[self.weight].abs()
        pairs = [(dx, weight), (x, dw), (dx, dw)]
        return sum((self(self._of(exact, *pair, power)) for pair in pairs), torch.zeros((), dtype=x.dtype))

    def _of(self, args: Sequence[Any], x: torch.Tensor, weight: torch.Tensor, power: int) -> list[Any]:
        """Return arguments with powers of other activations and another weight, without the bias."""
        given = list(args)
        given[self.activations], given[self.weight] = x**power, weight**power
        if self.op == "aten::addmm":
            given = [torch.zeros_like(given[0]), *given[1:4], abs(given[4]) ** power]
        elif self.added is not None:
            given[self.added] = None
        return given


LINEAR_OPS = {
    product.op: product
    for product in (
        LinearOp("aten::linear", features=0, added=2),
        LinearOp("aten::mm", features=1),
        LinearOp("aten::matmul", features=1),
        LinearOp("aten::addmm", features=1, added=0, activations=1, weight=2),
        LinearOp("aten::conv2d", features=0, added=2, rows=False),
    )
}
"""The ops with a reference, by name."""


_DEVIATIONS = 4.0
"""The bound of a sum of random errors, in halves of levels, which are 1.7 standard deviations of rounding."""


def call_op(name: str, args: Sequence[Any]) -> torch.Tensor:
    """Call an op with all arguments, in the order of its schema."""
    op = find_op(name)
    assert op is not None, name
    pairs = list(zip(op._schema.arguments, args, strict=True))
    named = {argument.name: value for argument, value in pairs if argument.kwarg_only}
    result: torch.Tensor = op(*(value for argument, value in pairs if not argument.kwarg_only), **named)
    return result


def assert_within(actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> None:
    """Check that a result is within an error of the expected one, before the rounding to its dtype.

    Raises:
        AssertionError: it is not, or its shape differs.
    """
    assert actual.shape == expected.shape, f"the shape is {tuple(actual.shape)}, not {tuple(expected.shape)}"
    limits = torch.finfo(actual.dtype)
    allowed = error + (expected.abs() + error) * limits.eps + limits.smallest_normal
    off = ((actual.double() - expected).abs() / allowed).nan_to_num(nan=torch.inf)
    assert (off <= 1).all(), f"the error is {off.max().item():.3g} times the bound of the recipe"


def run_prepacked(
    kernel: LowBitKernel, prepared: tuple[torch.Tensor, ...], *args: Any, dtype: torch.dtype, records: bool = False
) -> torch.Tensor:
    """Call a kernel with a prepacked weight, in a region with a fast dtype; `records`: with autograd.

    Raises:
        AssertionError: it returns another dtype than `dtype`.
    """
    device_type = args[kernel.weight].device.type
    before = torch.get_autocast_dtype(device_type)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        with torch.set_grad_enabled(records):
            result = kernel.run(prepared, *args)
    finally:
        torch.set_autocast_dtype(device_type, before)
    assert result.dtype is dtype, f"the result is {result.dtype}, not {dtype}"
    return result
