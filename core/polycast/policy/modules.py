"""Rules for modules: parse them, and find the modules of a model that they match."""

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

from .files import RECIPE
from .globs import compile_glob
from .names import dtype_name, nearest, nearest_as_text, read_dtype
from .op_policies import ModulePolicies
from .recipe import Recipe, find_kind, read_recipe
from .recipe_settings import ObjectDigest, resolve

FP32 = "fp32"
"""The rule for computing in float32."""
OFF = "off"
"""The rule for disabling autocast."""
CLASS = "class:"
"""The prefix of keys that name a class instead of modules."""

ModuleRule: TypeAlias = str | ModulePolicies | Recipe
"""``"fp32"``, ``"off"``, the name of a fast dtype, policies by op and the output dtype, or a recipe."""


def read_rules(modules: object) -> Mapping[str, ModuleRule]:
    """Return parsed rules for modules, in their order: the last rule that matches decides.

    Raises:
        ValueError: a key or rule is not valid; the message has a sentence for each.
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
    if not isinstance(key, str):
        raise ValueError(f"a key is a glob over names of modules, such as 'encoder.*.norm', or {CLASS!r} and a class")
    if key.startswith(CLASS) and not all(key.removeprefix(CLASS).split(".")):
        raise ValueError(f"{CLASS!r} is followed by a class's qualified name, such as 'class:torch.nn.LayerNorm'")
    compile_glob(key)


def _read_rule(rule: object) -> ModuleRule:
    if isinstance(rule, (Recipe, ModulePolicies)):
        return rule
    if isinstance(rule, Mapping):
        return recipe_of_table(rule) if RECIPE in rule else ModulePolicies(rule)
    if isinstance(rule, str) and find_kind(rule.lower().partition(":")[0]) is not None:
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
    """Return the recipe of a table in a policy file."""
    options = dict(table)
    given = options.pop(RECIPE)
    if not isinstance(given, (str, Recipe)):
        raise ValueError(f"{RECIPE!r} in a table is the name of a recipe such as 'int8', got {given!r}")
    recipe = read_recipe(given)
    unknown = options.keys() - recipe.settings.keys()
    if unknown:
        known = ", ".join(("'recipe'", *map(repr, recipe.settings)))
        raise ValueError(f"the table of a recipe {recipe.kind!r} has {known}; got {sorted(unknown)[0]!r}")
    for name, loader in recipe.loaders.items():
        if isinstance(options.get(name), str):
            try:
                options[name] = _object_in(options[name], loader)
            except OSError as error:
                raise ValueError(f"its {name} cannot be read: {error}") from error
    try:
        return recipe.with_options(**options)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _object_in(path: Any, loader: str) -> Any:
    """Return the object in a file; the same one for all rules that name it."""
    found = pkgutil.resolve_name(loader)(path)
    of_other_rule = resolve(ObjectDigest(found.digest))
    return of_other_rule if getattr(of_other_rule, "path", None) == found.path else found


class ModuleFinder:
    """Finds the modules of a model that keys of rules match."""

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(model.named_modules(remove_duplicate=False))

    def find(self, key: str) -> dict[str, nn.Module]:
        """Return the modules that a key matches, by name; instead of a container without forward, its children.

        Raises:
            ValueError: no module matches. The message has the nearest names.
        """
        if key.startswith(CLASS):
            matches = _class_predicate(key.removeprefix(CLASS))
            found = {name: module for name, module in self._named.items() if matches(module)}
        else:
            is_match = compile_glob(key)
            found = {name: module for name, module in self._named.items() if is_match(name)}
        if not found:
            raise ValueError(self._unknown(key))
        return {
            child_name: child for name, module in found.items() for child_name, child in _with_forward(name, module)
        }

    def _unknown(self, key: str) -> str:
        known = (
            {CLASS + _shortest_name(type(module)) for module in self._named.values()}
            if key.startswith(CLASS)
            else set(self._named) - {""}
        )
        return f"modules[{key!r}] matches no module of the model{nearest_as_text(key, sorted(known))}"


def _with_forward(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    forward = inspect.getattr_static(type(module), "forward")  # getattr fails for a ScriptModule
    if forward is not nn.Module.forward or "forward" in vars(module):
        yield name, module
    else:
        for child_name, child in module.named_children():
            yield from _with_forward(f"{name}.{child_name}".lstrip("."), child)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _shortest_name(cls: type) -> str:
    exported = getattr(nn, cls.__qualname__, None) is cls
    return f"torch.nn.{cls.__qualname__}" if exported else _full_name(cls)


def _class_predicate(name: str) -> Callable[[nn.Module], bool]:
    """Return a predicate for instances of a class, named by where it is defined or exported."""
    package, _, exported = name.rpartition(".")
    cls = getattr(sys.modules.get(package), exported, None)

    def matches(module: nn.Module) -> bool:
        if isinstance(cls, type):
            return isinstance(module, cls)
        return any(name in (_full_name(base), base.__qualname__) for base in type(module).__mro__)

    return matches
