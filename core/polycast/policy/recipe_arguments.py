"""Read the arguments of recipes. Dynamo traces this, too."""

import functools
import os
from collections.abc import Iterable
from urllib.parse import quote

from .names import known_overloads, read_op

MATMULS = ("addmm", "linear", "matmul", "mm")
"""The ops of recipes of lower precision, by default."""
PRODUCTS = (
    *("addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm"),
    "scaled_dot_product_attention",
)
"""The ops of `Fastest`, by default."""


def read_ops(ops: Iterable[str]) -> tuple[str, ...]:
    """Return the names of ops as a recipe has them, without repetitions, sorted."""
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise TypeError(f"ops must be names of ops, such as ('linear', 'mm'), got {ops!r}")
    given = tuple(ops)
    return given if given in (MATMULS, PRODUCTS) else _known_ops(given)


def _known_ops(ops: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sorted names of ops. Dynamo cannot trace the look-up, so it calls this and treats it as a constant."""
    return _sorted_ops(ops)


def quoted(path: str) -> str:
    """Return a path without spaces, as an absolute one. A constant to Dynamo, as above."""
    return quote(os.path.abspath(path))


for _each in (_known_ops, quoted):  # as torch.compiler.assume_constant_result does, which imports Dynamo
    setattr(_each, "_dynamo_marked_constant", True)


@functools.lru_cache(maxsize=64)
def _sorted_ops(ops: tuple[str, ...]) -> tuple[str, ...]:
    named = sorted({read_op(each).short for each in ops})
    for each in named:
        known_overloads(read_op(each))
    return tuple(named)
