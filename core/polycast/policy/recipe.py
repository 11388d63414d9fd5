"""The recipes that come with polycast, and the names of recipes."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from ..errors import warn_user
from .names import hint
from .recipe_base import Recipe, find_kind, kinds, restored
from .recipe_settings import MATMULS, ObjectDigest


class Int8(Recipe):
    """Matmuls of 8-bit integers, for inference.

    Weights are prepacked once, with a scale for each output feature; activations are quantized at each call. Ops that
    autograd records run in the fast dtype.

    Args:
        scales: ``"row"``: a scale for each row of the activations; ``"tensor"``: one for all.
        ops: the ops to compute, by names as in a :class:`Policy`.
        min_size: the smallest number of elements of a weight.
        equalization: an equalization of the model's weights, or None.

    Raises:
        TypeError, ValueError: see :class:`polycast.plugin.Recipe`.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(1024, 1024)
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8()):  # doctest: +SKIP
        ...     model(torch.randn(1, 1024)).dtype
        torch.bfloat16
    """

    kind = "int8"
    avoids_slow_dtypes = " (inference only)"
    scales: Literal["row", "tensor"] = "row"
    ops: Sequence[str] = MATMULS
    min_size: int = 2**16
    equalization: Any = None

    def check(self) -> None:
        """See :class:`polycast.plugin.Recipe`."""
        _check_equalization(self.equalization)

    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`polycast.plugin.Recipe`."""
        return _int8_errors(x, by_row=self.scales == "row"), _int8_errors(weight, by_row=True)


class Int4(Recipe):
    """Matmuls of weights in 4 bits and activations in 8 bits, for inference.

    A weight takes a little more than half a byte for each element, and one row is multiplied at the speed at which the
    weight is read. Rounding to 16 levels changes results more than :class:`Int8` does: measure the model, and equalize
    it. Ops that autograd records run in the fast dtype.

    Args:
        group_size: the number of successive input features that share a step between levels: 32, 64 or 128. A
            larger one takes less memory, and is less accurate.
        ops: the ops to compute, by names as in a :class:`Policy`.
        min_size: the smallest number of elements of a weight.
        equalization: an equalization of the model's weights, or None.

    Raises:
        TypeError, ValueError: see :class:`polycast.plugin.Recipe`.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(1024, 1024)
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int4()):  # doctest: +SKIP
        ...     model(torch.randn(1, 1024)).dtype
        torch.bfloat16
    """

    kind = "int4"
    group_size: Literal[32, 64, 128] = 32
    ops: Sequence[str] = MATMULS
    min_size: int = 2**16
    equalization: Any = None

    def check(self) -> None:
        """See :class:`polycast.plugin.Recipe`."""
        _check_equalization(self.equalization)

    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`polycast.plugin.Recipe`."""
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % self.group_size))
        groups = _largest(padded.reshape(-1, self.group_size), by_row=True).reshape(padded.shape)
        return _int8_errors(x, by_row=True), groups[:, : weight.shape[1]] / 16  # half of one of 16 levels


class Float8(Recipe):
    """Matmuls of 8-bit floats (e4m3), for inference. Experimental.

    Args:
        scales: ``"row"``: a scale for each row of the activations and each output feature; ``"tensor"``: one for the
            activations, and one for the weight.
        ops, min_size: as for :class:`Int8`.

    Raises:
        TypeError, ValueError: see :class:`polycast.plugin.Recipe`.
    """

    kind = "float8"
    scales: Literal["row", "tensor"] = "row"
    ops: Sequence[str] = MATMULS
    min_size: int = 2**22

    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`polycast.plugin.Recipe`."""
        by_row = self.scales == "row"
        return _float8_errors(x, by_row), _float8_errors(weight, by_row)


class NoRecipe(Recipe):
    """No recipe: in a region inside one with a recipe, policies apply as usual."""

    kind = "none"


RecipeLike: TypeAlias = Recipe | str
"""The type of every ``recipe=`` argument: a recipe, or a name, such as ``"fastest"``, ``"int8:tensor"``, ``"none"``."""


def read_recipe(recipe: object) -> Recipe:
    """Return a recipe, given as one or by name.

    Raises:
        TypeError: it is neither.
        ValueError: no recipe has the name. The message has the nearest name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(f"recipe is the class {recipe.__name__}: call it, {recipe.__name__}()")
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a Recipe such as polycast.Int8(), the name of one, or None, got {recipe!r}")
    of_kind: Any = find_kind(recipe.partition(":")[0])
    return _of_name(recipe, of_kind)


@functools.lru_cache(maxsize=64)
def _of_name(recipe: str, of_kind: type[Recipe] | None) -> Recipe:
    """Return the recipe with a name, given the class of its kind: a notebook may define that again."""
    words = recipe.split(":")[1:]
    setting_of = {} if of_kind is None else _words(of_kind)
    settings = {setting_of[word]: word for word in words if word in setting_of}
    if of_kind is None or len(settings) < len(words):
        known = [
            name for kind, each in all_kinds().items() for name in (kind, *(f"{kind}:{word}" for word in _words(each)))
        ]
        raise ValueError(f"{recipe!r} is not a recipe: {hint(recipe, known)}")
    return restored(of_kind, settings)


def _words(kind: type[Recipe]) -> dict[str, str]:
    """Return the words that names of a kind may have, with their settings."""
    return {word: setting for setting, words in kind.named_settings().items() for word in words}


def all_kinds() -> dict[str, type[Recipe]]:
    """Return the classes of recipes by kind, with those of plugins; warn of those that cannot be used."""
    from . import manifests

    for name in {name for each in manifests.manifests() for name in each.plugin.recipes}:
        try:
            find_kind(name)
        except RuntimeError as error:
            warn_user(str(error))
    return kinds


def all_recipes() -> list[Recipe]:
    """Return a recipe of each kind that is known, those of plugins included, except "none"; with its defaults."""
    return [restored(kind, {}) for name, kind in all_kinds().items() if name != NoRecipe.kind]


def is_recipe_name(text: str) -> bool:
    """Return whether a text names a recipe."""
    return find_kind(text.partition(":")[0]) is not None


def _check_equalization(value: object) -> None:
    if value is not None and not isinstance(value, ObjectDigest) and not hasattr(value, "factors"):
        remedy = ". polycast.Equalization.load reads a file" if isinstance(value, str) else ""
        raise TypeError(
            f"equalization must be an Equalization, as polycast.equalize returns it, or None, got {value!r}{remedy}"
        )


def _largest(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return the largest magnitude of each row, or of all, in the shape of the values."""
    magnitudes = values.abs()
    if not by_row:
        magnitudes = magnitudes.flatten()[None]
    # Scales, and their inverses, are normal numbers.
    return magnitudes.amax(1, keepdim=True).clamp(min=2.0**-110).expand(magnitudes.shape).reshape(values.shape)


def _int8_errors(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return half of one of 255 levels, and a thousandth more for the rounding of scales."""
    return _largest(values, by_row) / 127 / 2 * 1.001


def _float8_errors(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return half of the last of 4 bits, where the largest value is 448 and the smallest are multiples of 2**-9.

    A hundredth more is for the rounding of scales and sums.
    """
    return torch.maximum(values.abs() / 16, _largest(values, by_row) / 448 / 2**10) * 1.01
