"""Rules for modules, as people write them: which modules, and what becomes of the ops in them."""

import inspect
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import nn

from .dtypes import dtype_name
from .globs import Glob, Names
from .names import MOST_PROBLEMS, error_of, nearest, read_dtype
from .ops import Ops
from .recipes import Recipe, is_recipe_name, read_recipe

FP32 = "fp32"
"""The rule of a module that computes in float32."""
OFF = "off"
"""The rule of a module in which autocast is off."""
RECIPE = "recipe"
"""The key of a table that is a recipe."""
CLASS = "class:"
"""What a key begins with that names a class, not modules by their names."""

ModuleRule: TypeAlias = str | Ops | Recipe
"""``"fp32"``, ``"off"``, the name of a fast dtype, policies for the ops of the region inside, or a recipe for it."""


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
            if len(problems) == MOST_PROBLEMS:
                break
    if problems:
        raise error_of(problems)
    return MappingProxyType(rules)


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise ValueError(f"a key is a glob over names of modules, such as 'encoder.*.norm', or {CLASS!r} and a class")
    if key.startswith(CLASS) and not all(key.removeprefix(CLASS).split(".")):
        raise ValueError(f"{CLASS!r} is followed by a class's qualified name, such as 'class:torch.nn.LayerNorm'")
    Glob(key)


def _read_rule(rule: object) -> ModuleRule:
    if isinstance(rule, Recipe):
        rule.written  # noqa: B018  it raises where a file cannot say it
        return rule
    if isinstance(rule, Mapping):
        return recipe_of_table(rule) if RECIPE in rule else Ops(rule)
    if isinstance(rule, str) and is_recipe_name(rule.lower()):
        return read_recipe(rule.lower())
    if isinstance(rule, str) and rule.lower() in (FP32, OFF):
        return rule.lower()
    try:
        dtype = read_dtype(rule)
    except ValueError:
        alike = nearest(rule, (FP32, OFF, "float16", "bfloat16"))
        raise ValueError(
            f"a rule is {FP32!r}, {OFF!r}, the name of a fast dtype such as 'float16', a recipe such as 'int8', or a "
            f"mapping of ops to policies; got {rule!r}" + (f", the nearest is {alike[0]!r}" if alike else "")
        ) from None
    if dtype is torch.float32:
        return FP32
    if not dtype.is_floating_point:
        raise ValueError(f"a fast dtype is a floating-point one, got {dtype_name(dtype)!r}")
    return dtype_name(dtype)


def recipe_of_table(table: Mapping[str, object]) -> Recipe:
    """Return the recipe that a table of a policy file says."""
    said = dict(table)
    recipe = read_recipe(said.pop(RECIPE))
    unknown = said.keys() - {"ops", "min_size"}
    if unknown:
        raise ValueError(f"a recipe's table has 'recipe', 'ops' and 'min_size', got {sorted(unknown)[0]!r}")
    try:
        return type(recipe)(recipe.scales, **said)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(str(error)) from None


class ModuleFinder:
    """Find the modules of a model that the keys of rules mean."""

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(model.named_modules(remove_duplicate=False))
        self._names = Names(self._named)

    def find(self, key: str) -> dict[str, nn.Module]:
        """Return the modules that a key means, by name. A container without a forward stands for what it contains.

        Raises:
            ValueError: no module matches, with the nearest names.
        """
        if key.startswith(CLASS):
            wanted = _is_instance_of(key.removeprefix(CLASS))
            found = {name: module for name, module in self._named.items() if wanted(module)}
        else:
            found = {name: self._named[name] for name in Glob(key).find(self._names)}
        if not found:
            raise ValueError(self._unknown(key))
        meant: dict[str, nn.Module] = {}
        for name, module in found.items():
            meant |= _with_forward(name, module)
        return meant

    def _unknown(self, key: str) -> str:
        known = (
            {CLASS + _shortest_name(type(module)) for module in self._named.values()}
            if key.startswith(CLASS)
            else set(self._named) - {""}
        )
        alike = nearest(key, sorted(known))
        return f"modules[{key!r}] matches no module of the model" + (
            f"; the nearest {'is' if len(alike) == 1 else 'are'} {', '.join(map(repr, alike))}" if alike else ""
        )


def _with_forward(name: str, module: nn.Module) -> dict[str, nn.Module]:
    forward = inspect.getattr_static(type(module), "forward")  # to get that of a ScriptModule would fail
    if forward is not nn.Module.forward or "forward" in vars(module):
        return {name: module}
    meant: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        meant |= _with_forward(f"{name}.{child_name}".lstrip("."), child)
    return meant


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _shortest_name(cls: type) -> str:
    exported = getattr(nn, cls.__qualname__, None) is cls
    return f"torch.nn.{cls.__qualname__}" if exported else _full_name(cls)


def _is_instance_of(name: str) -> Callable[[nn.Module], bool]:
    """Return what tells the modules of a class and its subclasses, by the name where it is defined or exported."""
    package, _, exported = name.rpartition(".")
    cls = getattr(sys.modules.get(package), exported, None)

    def is_one(module: nn.Module) -> bool:
        if isinstance(cls, type):
            return isinstance(module, cls)
        return any(name in (_full_name(base), base.__qualname__) for base in type(module).__mro__)

    return is_one
