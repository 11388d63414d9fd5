"""Read the settings of recipes, and write them as text. Dynamo traces this, too."""

import ast
import functools
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from ..torch_internals.private_names import constant_to_dynamo
from .names import known_overloads, read_op

NAME = r"\w+(-\w+)*"
"""A kind of recipes, or a word after it in the name of one."""
_SIMPLE_TYPES = (bool, int, float, str)
"""The types that settings are checked for."""
_LITERALS = (str, float, tuple, type(None))
_PLAIN = (str, float, int, bool, type(None))
objects: dict[str, Any] = {}
"""The objects that are settings of this process's recipes, by digest."""


@dataclass(frozen=True)
class ObjectDigest:
    """An object of which only the digest is known."""

    digest: str


def expectation(hint: Any) -> Any:
    """Return what `read_setting` expects of a setting, given its annotation."""
    return get_args(hint) if get_origin(hint) is Literal else hint if hint in _SIMPLE_TYPES else None


def check_words(owner: str, defaults: Mapping[str, Any], named: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ValueError if a recipe's name would not say which setting has which value.

    Args:
        owner: the class of the recipe.
        defaults: the defaults of its settings.
        named: the words that each of the settings in its name can have.
    """
    setting_of: dict[str, str] = {}
    for name, words in named.items():
        if defaults[name] not in words:
            raise ValueError(f"{owner}.{name} must be one of {words}, got the default {defaults[name]!r}")
        for word in words:
            if not re.fullmatch(NAME, word):
                raise ValueError(f"{owner}.{name} must list words such as 'row', for names, got {word!r}")
            if setting_of.setdefault(word, name) != name:
                raise ValueError(
                    f"{owner}.{setting_of[word]} and .{name} both list {word!r}, so that a name such as "
                    f"'int8:{word}' could mean either: rename one"
                )


def is_object(value: object) -> bool:
    """Return whether a setting is an object, which texts and files can only name."""
    return hasattr(value, "digest")


def read_setting(name: str, value: Any, expected: Any) -> Any:
    """Return the value of a setting.

    Args:
        name: its name.
        value: as given.
        expected: a tuple of the values that it can have, one of `_SIMPLE_TYPES`, or None.

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
    if expected in _SIMPLE_TYPES:
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
    return _known_ops(given) if given else ()


def text_of(name: str, value: Any) -> str:
    """Return a setting as text, from which `settings_in` reads it.

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


def settings_in(text: str) -> dict[str, Any]:
    """Return the settings in the text of a recipe, by name.

    Raises:
        ValueError: it is not the text of a recipe.
    """
    call = _parsed("settings(" + text.partition("(")[2])
    if not isinstance(call, ast.Call):
        raise ValueError(f"{text!r} is not the text of a recipe")
    return {str(each.arg): _value_of(each.value) for each in call.keywords}


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr | None:
    """Return an expression, parsed; None if the text is not one."""
    while True:
        try:
            return ast.parse(text, mode="eval").body
        except SyntaxError:
            return None
        except SystemError:  # the parser of Python 3.11, disturbed by another thread that parses
            continue


def _value_of(node: ast.expr) -> Any:
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
