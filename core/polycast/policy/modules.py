"""Rules for modules, as people write them: which modules, and what becomes of the ops in them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from .dtypes import dtype_name
from .names import nearest, read_dtype
from .ops import Ops

FP32 = "fp32"
"""The rule of a module that computes in float32."""
OFF = "off"
"""The rule of a module in which autocast is off."""
CLASS = "class:"
"""What a key begins with that names a class, not modules by their names."""

ModuleRule: TypeAlias = str | Ops
"""``"fp32"``, ``"off"``, the name of a fast dtype, or policies for the ops of the region inside."""


def read_rules(modules: object) -> Mapping[str, ModuleRule]:
    """Return rules for modules, checked; their order is theirs, for the last one that matches decides.

    Raises:
        ValueError: with a sentence for each problem.
    """
    if not isinstance(modules, Mapping):
        raise ValueError(f"modules must map names of modules to rules, got {type(modules).__name__}")
    rules: dict[str, ModuleRule] = {}
    problems: list[str] = []
    for key, rule in modules.items():
        try:
            _check_key(key)
            rules[key] = _read_rule(rule)
        except ValueError as error:
            problems.append(f"modules[{key!r}]: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return MappingProxyType(rules)


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise ValueError(f"a key is a glob over names of modules, such as 'encoder.*.norm', or {CLASS!r} and a class")
    if key.startswith(CLASS) and not all(key.removeprefix(CLASS).split(".")):
        raise ValueError(f"{CLASS!r} is followed by a class's qualified name, such as 'class:torch.nn.LayerNorm'")


def _read_rule(rule: object) -> ModuleRule:
    if isinstance(rule, Mapping):
        return Ops(rule)
    if isinstance(rule, str) and rule.lower() in (FP32, OFF):
        return rule.lower()
    try:
        dtype = read_dtype(rule)
    except ValueError:
        alike = nearest(rule, (FP32, OFF, "float16", "bfloat16"))
        raise ValueError(
            f"a rule is {FP32!r}, {OFF!r}, the name of a fast dtype such as 'float16', or a mapping of ops to "
            f"policies; got {rule!r}" + (f", the nearest is {alike[0]!r}" if alike else "")
        ) from None
    if dtype is torch.float32:
        return FP32
    if not dtype.is_floating_point:
        raise ValueError(f"a fast dtype is a floating-point one, got {dtype_name(dtype)!r}")
    return dtype_name(dtype)
