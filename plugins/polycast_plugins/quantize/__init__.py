"""The recipes Int8, Int4 and Float8, and their kernels; also the kernels of the recipe "fastest" for the CPU.

The manifest is in a module of its own, because the first region imports this package to find the extensions.
"""

from typing import TYPE_CHECKING

from polycast.plugin import lazy_names

if TYPE_CHECKING:
    from .equalization import EqualizedWeight as EqualizedWeight
    from .low_bit_matmul import LowBitMatmul as LowBitMatmul
    from .low_bit_recipes import LowBitRecipe as LowBitRecipe
    from .products import Products as Products

_PLACES = {
    "EqualizedWeight": "equalization",
    "LowBitMatmul": "low_bit_matmul",
    "LowBitRecipe": "low_bit_recipes",
    "Products": "products",
}
"""The module of each name that packages of recipes and kernels, and other plugins, import."""

__all__ = [*_PLACES]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, _PLACES)
