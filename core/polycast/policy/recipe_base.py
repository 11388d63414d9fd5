"""`Recipe`: a way to compute ops with the policy LOWER_PRECISION_FP. Subclasses declare their settings."""

import ast
import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from typing_extensions import Self, dataclass_transform

from ..common import generation
from .names import hint, known_overloads, read_op
from .recipe_settings import SIMPLE_TYPES, is_object, read_setting, text_of, value_of

kinds: dict[str, type["Recipe"]] = {}
"""The classes of recipes, by kind."""
_NAME = r"\w+(-\w+)*"
"""A kind, or a word after it in a recipe's name."""
_Class = TypeVar("_Class", bound="Recipe")


@dataclass_transform(eq_default=False, frozen_default=True)
class Recipe:
    """A way to compute ops with the policy LOWER_PRECISION_FP: in a lower precision, or the fastest one.

    An immutable value for ``polycast.autocast(..., recipe=...)``. Outputs have the fast dtype, and ops without a kernel
    for the recipe compute in it. To compute a module in the fast dtype, give it the rule ``"none"``
    (:func:`polycast.apply_policy`). Recipes with equal settings are equal, and can be made in compiled code.

    To define a recipe, subclass it. A subclass has a `kind`, which backends query, and declares its settings as the
    fields of a dataclass, each with a default, and without the decorator. Equality, text, pickles, names and policy
    files follow from them. A setting is a str, a number, a bool, None, a tuple of these, or an object with a `digest`:
    a str that is the same for equal objects, and for no others. ``Literal`` lists the values that a setting can have.
    If these are strings, the value can be part of the recipe's name, as in ``"int8:tensor"``, so no two settings list
    the same string. All subclasses have

    Attributes:
        ops: the ops to compute by the recipe if the backend has a kernel, by names as in a :class:`polycast.Policy`.
            None of them, unless the subclass declares it.
        min_size: the smallest number of elements of a weight for which the recipe is used. 0, unless declared.
        text: the kind and the settings as text, the same in every process for equal recipes.

    Raises:
        TypeError: a setting is of another type than declared; it has no default; or the class has no kind of its own.
        ValueError: it is not one of those that ``Literal`` lists; torch has no such op; or `min_size` is negative.

    Example:
        >>> from collections.abc import Sequence
        >>> from typing import Literal
        >>> import polycast
        >>> class Nf4(polycast.plugin.Recipe):
        ...     kind = "nf4"
        ...     group_size: Literal[32, 64] = 32
        ...     ops: Sequence[str] = ("linear", "mm")
        >>> Nf4(64), Nf4(64) == Nf4(), polycast.Policy(modules={"head": "nf4"}).modules["head"] == Nf4()
        (Nf4(group_size=64), False, True)
    """

    kind: ClassVar[str]
    needs_kernels: ClassVar[bool] = True
    """Whether a device supports the recipe only if its backend says so."""
    avoids_slow_dtypes: ClassVar[str | None] = None
    """Text after the recipe's name in messages that suggest it in place of a slow fast dtype, such as
    ``" (inference only)"``. None: they do not suggest it."""
    plan_class: ClassVar[str] = "polycast.engine.recipes.kernel_plan:KernelPlan"
    """The subclass of `Plan` that computes the recipe, as ``module:class``. It is imported at the first use."""
    _defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    _expected: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The values or the type that `read_setting` accepts, by setting."""

    ops: Sequence[str] = ()
    min_size: int = 0
    text: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        declared = fields(dataclass(frozen=True, eq=False, repr=False)(cls))  # type: ignore[arg-type]
        for field in declared:
            if field.default is MISSING:
                raise TypeError(f"{cls.__name__}.{field.name} needs a default: a recipe's name stands for its defaults")
        hints = get_type_hints(cls)
        cls._defaults = {field.name: field.default for field in declared}
        cls._expected = {field.name: _expectation(hints[field.name]) for field in declared}
        _check_words(cls)
        kind = vars(cls).get("kind")
        if kind is not None:
            _check_kind(cls, kind)
            kinds[kind] = cls
            generation.advance()  # a name may have been that of another class
        elif hasattr(cls, "kind"):
            owner = next(base.__name__ for base in cls.__mro__ if "kind" in vars(base))
            raise TypeError(
                f"{cls.__name__} needs a kind of its own, such as kind = {cls.__name__.lower()!r}: what is written "
                f"with the kind {cls.kind!r} is read as {owner}"
            )

    def __init__(self) -> None:
        self.__post_init__()

    def __post_init__(self) -> None:
        # Dynamo traces this and the functions that it calls.
        if not hasattr(self, "kind"):
            raise TypeError(f"{type(self).__name__} is no kind of recipe: use one such as polycast.Int8")
        for name in self._defaults:
            object.__setattr__(self, name, read_setting(name, getattr(self, name), self._expected[name]))
        self.check()
        object.__setattr__(self, "text", self._text_of(*self._defaults))

    def check(self) -> None:
        """Raise TypeError or ValueError if the settings cannot be used. A subclass may override it."""

    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return how far the recipe may round activations and a weight. The conformance suite tests kernels by it.

        Args:
            x: float64 [M, K]; what may have a scale of its own is a row.
            weight: float64 [N, K], a row for each output feature.

        Returns:
            For each element of `x`, and of `weight`, the largest error. None, unless a subclass overrides it: the
            values that kernels compute are not tested.
        """
        return None

    def resolved(self, device_type: str, measure: bool) -> "Recipe":
        """Return the recipe with what it takes from this machine. A subclass may override it; others return themselves.

        What it returns is kept, for equal arguments and a number of threads of torch, until
        :func:`polycast.plugin.refresh`.

        Args:
            device_type: of the region.
            measure: whether it may take the time to measure the device.

        Raises:
            RuntimeError: it cannot be used on the device now; the message says why.
        """
        return self

    @classmethod
    def of_text(cls, text: str) -> "Recipe":
        """Return the recipe with a `text`. An object that this process does not have is an `ObjectDigest`.

        Raises:
            KeyError: this process has no such kind of recipe.
            ValueError: it is not the text of a recipe.
        """
        kind, _, settings = text.partition("(")
        call = _parsed(f"settings({settings}")
        if not isinstance(call, ast.Call):
            raise ValueError(f"{text!r} is not the text of a recipe")
        of_kind = find_kind(kind)
        if of_kind is None:
            raise KeyError(kind)
        return restored(of_kind, {str(each.arg): value_of(each.value) for each in call.keywords})

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, by name."""
        return {name: getattr(self, name) for name in self._defaults}

    @property
    def format(self) -> str:
        """The text without `ops` and `min_size`: what a prepacked weight depends on."""
        return self._text_of(*(name for name in self._defaults if name not in ("ops", "min_size")))

    @property
    def overloads(self) -> frozenset[str]:
        """The ops to compute by the recipe, by dispatcher name."""
        return frozenset(name for op in self.ops for name in known_overloads(read_op(op)))

    @property
    def short(self) -> str:
        """Its name, of the kind and choices other than the default, such as ``"int8"`` or ``"int8:tensor"``."""
        values = [getattr(self, name) for name in self.named_settings() if getattr(self, name) != self._defaults[name]]
        return ":".join([self.kind, *values])

    @property
    def written(self) -> str | dict[str, Any]:
        """The recipe as in a policy file: its name, or a table if it has other settings.

        Raises:
            ValueError: a setting is an object without a file.
        """
        others = {name: value for name, value in self._changed().items() if name not in self.named_settings()}
        for name, value in others.items():
            if is_object(value):
                value = self._path_of(name, value)
            others[name] = list(value) if isinstance(value, tuple) else value
        return {"recipe": self.short, **others} if others else self.short

    def _path_of(self, name: str, value: Any) -> str:
        """Return the path of a setting that is an object."""
        if not hasattr(value, "saved_path"):
            raise ValueError(
                f"{self!r} cannot be written: its {name} is an object. A policy file has texts and numbers only, "
                "such as the path of a saved one, where the recipe takes that. A Policy made in Python can have it"
            )
        try:
            path: str = value.saved_path()
        except ValueError as error:
            raise ValueError(f"{self!r} cannot be written: {error}") from None
        return path

    @property
    def has_objects(self) -> bool:
        """Whether a setting is an object, such as an equalization, of which a policy file can have the path only."""
        return any(map(is_object, self.settings.values()))

    def with_options(self, **options: Any) -> Self:
        """Return the recipe with other settings.

        Raises:
            TypeError, ValueError: a setting is invalid.
        """
        unknown = sorted(options.keys() - self._defaults.keys())
        if unknown:
            raise TypeError(f"{type(self).__name__} has no setting {unknown[0]!r}: {hint(unknown[0], self._defaults)}")
        return restored(type(self), {**self.settings, **options})

    @classmethod
    def named_settings(cls) -> dict[str, tuple[str, ...]]:
        """Return the settings that are part of names, with the values that they can have."""
        choices = {name: values for name, values in cls._expected.items() if isinstance(values, tuple)}
        return {name: values for name, values in choices.items() if all(isinstance(each, str) for each in values)}

    def _changed(self) -> dict[str, Any]:
        """Return the settings other than the defaults."""
        default = restored(type(self), {})
        return {name: value for name, value in self.settings.items() if value != getattr(default, name)}

    def _text_of(self, *names: str) -> str:
        return f"{self.kind}({', '.join([f'{name}={text_of(name, getattr(self, name))}' for name in names])})"

    def __eq__(self, other: object) -> bool:
        return (type(self), self.text) == (type(other), other.text) if isinstance(other, Recipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        shown = {
            name: f"<{type(value).__name__} {value.digest}>" if is_object(value) else repr(value)
            for name, value in self._changed().items()
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), self.settings)


def find_kind(name: str) -> type[Recipe] | None:
    """Return the class of a kind of recipes, which may be that of a plugin; None if there is none.

    Raises:
        RuntimeError: the plugin that has it is broken, or several have it.
    """
    from . import manifests  # most programs use no recipe

    importlib.import_module(".recipe", __package__)  # defines those that come with polycast
    found = None if name in kinds else manifests.manifests().find("recipes", name)  # which imports it
    if found is not None and name not in kinds:
        raise RuntimeError(
            f"A plugin names {found!r} as the recipe {name!r}, whose kind is another. Repair the plugin."
        )
    return kinds.get(name)


def restored(kind: type[_Class], settings: Mapping[str, Any]) -> _Class:
    """Return a recipe with these settings, and the defaults of others, without calling a subclass's constructor."""
    recipe = object.__new__(kind)
    for name, default in kind._defaults.items():
        object.__setattr__(recipe, name, settings.get(name, default))
    recipe.__post_init__()
    return recipe


def resolved(recipe: Recipe, device_type: str, measure: bool) -> Recipe:
    """Return what the recipe's method of this name does, or did before in this generation."""
    return _resolved(generation.number, torch.get_num_threads(), recipe, device_type, measure)


@functools.lru_cache(maxsize=64)
def _resolved(generation: int, threads: int, recipe: Recipe, device_type: str, measure: bool) -> Recipe:
    return recipe.resolved(device_type, measure)


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


def _check_kind(cls: type[Recipe], kind: object) -> None:
    if not isinstance(kind, str) or not re.fullmatch(_NAME, kind):
        raise ValueError(f"{cls.__name__}.kind must be a name such as 'int8', got {kind!r}")
    name = f"{cls.__module__}.{cls.__qualname__}"
    known = kinds.get(kind)
    taken = None if known is None else f"{known.__module__}.{known.__qualname__}"
    if known is None and not name.startswith("polycast."):  # the class of a plugin may not be imported yet
        from . import manifests

        offers = [each.plugin.recipes[kind] for each in manifests.manifests() if kind in each.plugin.recipes]
        places = [offer.replace(":", ".") for offer in offers]
        taken = name if name in places else next(iter(places), None)
    if taken not in (None, name):
        raise ValueError(f"{cls.__name__}.kind is {kind!r}, which is the kind of {taken}: give it another")


def _check_words(cls: type[Recipe]) -> None:
    """Raise ValueError if a recipe's name would not say which setting has which value."""
    setting_of: dict[str, str] = {}
    for name, words in cls.named_settings().items():
        if cls._defaults[name] not in words:
            raise ValueError(f"{cls.__name__}.{name} must be one of {words}, got the default {cls._defaults[name]!r}")
        for word in words:
            if not re.fullmatch(_NAME, word):
                raise ValueError(f"{cls.__name__}.{name} must list words such as 'row', for names, got {word!r}")
            if setting_of.setdefault(word, name) != name:
                raise ValueError(
                    f"{cls.__name__}.{setting_of[word]} and .{name} both list {word!r}, so that a name such as "
                    f"'int8:{word}' could mean either: rename one"
                )


def _expectation(hint: Any) -> Any:
    """Return what `read_setting` expects of a setting, given its annotation."""
    return get_args(hint) if get_origin(hint) is Literal else hint if hint in SIMPLE_TYPES else None
