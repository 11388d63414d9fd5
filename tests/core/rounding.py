"""`Rounded`: a recipe of the tests of the core, which has none without plugins."""

from collections.abc import Sequence
from typing import Literal

from polycast.plugin import Recipe
from polycast.policy.recipe import kinds


class Rounded(Recipe):
    """Products with weights in 8 bits."""

    kind = "rounded"
    avoids_slow_dtypes = " (inference only)"
    scales: Literal["row", "tensor"] = "row"
    ops: Sequence[str] = ("addmm", "linear", "matmul", "mm")
    min_size: int = 2**16


del kinds["rounded"]  # it is known in the tests of the core only
