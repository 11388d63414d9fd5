"""Read the settings of recipes, and write them as text. Dynamo traces this, too."""

import ast
import functools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..torch_internals.private_names import constant_to_dynamo
from .names import known_overloads, read_op

MATMULS = ("addmm", "linear", "matmul", "mm")
"""The ops of recipes of lower precision, by default."""
POINTWISE_OPS = frozenset(f"aten::{name}" for name in ("gelu", "mish", "sigmoid", "silu", "tanh"))
"""Elementwise ops without a policy that kernels of backends may compute for a recipe, with the same results."""
COMPOSED_OPS = {
    "aten::_transformer_encoder_layer_fwd": (
        *("aten::_native_multi_head_attention", "aten::_addmm_activation", "aten::addmm", "aten::layer_norm"),
        *("aten::native_layer_norm", "aten::add_.Tensor"),
    )
}
"""Ops without a policy that a recipe can compute as a whole. By op, the ops that it calls."""
WITHOUT_POLICY = COMPOSED_OPS.keys() | POINTWISE_OPS
"""The ops that a recipe can compute although they have no policy."""
SIMPLE_TYPES = (bool, int, float, str)
"""The types that settings are checked for."""

_LITERALS = (str, float, tuple, type(None))
_PLAIN = (str, float, int, bool, type(None))
objects: dict[str, Any] = {}
"""The objects that are settings of this process's recipes, by digest."""


@dataclass(frozen=True)
class ObjectDigest:
    """An object of which only the digest is known."""

    digest: str


def is_object(value: object) -> bool:
    """Return whether a setting is an object, which texts and files can only name."""
    return hasattr(value, "digest")


def read_setting(name: str, value: Any, expected: Any) -> Any:
    """Return the value of a setting.

    Args:
        name: its name.
        value: as given.
        expected: a tuple of the values that it can have, one of `SIMPLE_TYPES`, or None.

    Raises:
        TypeError: it is of another type.
        ValueError: it has another value, or names an op that torch does not have.
    """
    if name == "ops":
        return read_ops(value)
    if isinstance(expected, tuple):
        for each in expected:
            if each == value:
                return each  # 64 for 64.0: equal settings have the same text
        raise ValueError(f"{name} must be {' or '.join(map(repr, expected))}, got {value!r}")
    if expected in SIMPLE_TYPES:
        wanted = (int, float) if expected is float else expected
        if not isinstance(value, wanted) or (isinstance(value, bool) and expected is not bool):
            raise TypeError(f"{name} must be {'an' if expected is int else 'a'} {expected.__name__}, got {value!r}")
    if name == "min_size" and value < 0:
        raise ValueError(f"min_size must not be negative, got {value}")
    if expected is float:
        return float(value)
    if isinstance(value, list):
        return tuple(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def read_ops(ops: Iterable[str]) -> tuple[str, ...]:
    """Return the names of ops as a recipe has them, without repetitions, sorted."""
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise TypeError(f"ops must be names of ops, such as ('linear', 'mm'), got {ops!r}")
    given = tuple(ops)
    return given if given in (MATMULS, ()) else _known_ops(given)


def text_of(name: str, value: Any) -> str:
    """Return a setting as text, from which `value_of` reads it.

    Raises:
        TypeError: it is none of the types that a setting can have.
    """
    if isinstance(value, int):
        return f"{value}" if isinstance(value, bool) else f"{int(value)}"  # int() makes a constant of a symbolic number
    if isinstance(value, _LITERALS):
        return _literal(name, value)
    digest = getattr(value, "digest", None)
    if not isinstance(digest, str):
        raise TypeError(
            f"{name} must be a str, a finite number, a bool, None, a tuple of these, or an object with a `digest`; "
            f"got {value!r}"
        )
    if not isinstance(value, ObjectDigest):
        objects[digest] = value
    return f"digest({digest!r})"


def value_of(node: ast.expr) -> Any:
    """Return the value of a setting, given its text as parsed."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    return resolve(ObjectDigest(ast.literal_eval(node.args[0])))


def resolve(value: Any) -> Any:
    """Return the object that this process has for an `ObjectDigest`, if it has one; other values as they are."""
    return objects.get(value.digest, value) if isinstance(value, ObjectDigest) else value


@constant_to_dynamo  # which cannot trace the look-up
def _known_ops(ops: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sorted names of ops."""
    return _sorted_ops(ops)


@constant_to_dynamo
def _literal(name: str, value: Any) -> str:
    """Return a plain value as Python writes it."""
    if not _is_plain(value):
        raise TypeError(f"{name} must have strs, finite numbers, bools and None only, got {value!r}")
    return repr(value)


def _is_plain(value: object) -> bool:
    """Return whether Python reads a value's repr as the same value. Subclasses may write themselves differently."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN and (type(value) is not float or math.isfinite(value))


@functools.lru_cache(maxsize=64)
def _sorted_ops(ops: tuple[str, ...]) -> tuple[str, ...]:
    named = sorted({read_op(each).short for each in ops})
    for each in named:
        known_overloads(read_op(each))
    return tuple(named)
