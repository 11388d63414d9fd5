"""`Recipe`: a way to compute ops with the policy LOWER_PRECISION_FP, and the names of recipes."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias, TypeVar, get_type_hints

from typing_extensions import Self, dataclass_transform

from ..common import generation
from ..errors import warn_user
from ..torch_internals.patcher import Feature
from . import recipe_settings
from .names import hint, known_overloads, read_op
from .recipe_settings import ObjectDigest, is_object, read_setting, resolve, text_of

_Class = TypeVar("_Class", bound="Recipe")
kinds: dict[Any, Any] = {}
"""The classes of recipes, by kind."""


def _define(cls: Any, kind: object) -> None:
    """Add a class of recipes, if it can have the kind."""
    if not isinstance(kind, str) or not re.fullmatch(recipe_settings.NAME, kind):
        raise ValueError(f"{cls.__name__}.kind must be a name such as 'int8', got {kind!r}")
    if cls.ops and not cls.plan_class:
        raise TypeError(f"{cls.__name__} needs a plan_class for its ops, as polycast_plugins.quantize.LowBitRecipe has")
    name, known = f"{cls.__module__}.{cls.__qualname__}", kinds.get(kind)
    taken = None if known is None else f"{known.__module__}.{known.__qualname__}"
    if known is None and not name.startswith("polycast."):  # the class of a plugin may not be imported yet
        from .manifests import manifests

        places = [each.plugin.recipes[kind].replace(":", ".") for each in manifests() if kind in each.plugin.recipes]
        taken = name if name in places else next(iter(places), None)
    if taken not in (None, name):
        raise ValueError(f"{cls.__name__}.kind is {kind!r}, which is the kind of {taken}: give it another")
    kinds[kind] = cls
    generation.advance()  # a name may have been that of another class


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
        ...     plan_class = "acme.plans:Nf4Plan"
        ...     group_size: Literal[32, 64] = 32
        ...     ops: Sequence[str] = ("linear", "mm")
        >>> Nf4(64), Nf4(64) == Nf4(), polycast.Policy(modules={"head": "nf4"}).modules["head"] == Nf4()
        (Nf4(group_size=64), False, True)
    """

    kind: ClassVar[str]
    needs_kernels: ClassVar[bool] = True
    """Whether a device supports the recipe only if its backend says so."""
    avoids_slow_dtypes: ClassVar[str | None] = None
    """Ends the name of the recipe where messages suggest it in place of a slow dtype; None: they do not suggest it."""
    plan_class: ClassVar[str] = ""
    """The subclass of `Plan` that computes the recipe, as ``module:class``. It is imported at the first use."""
    without_policy: ClassVar[frozenset[str]] = frozenset()
    """The ops that it can compute although they have no policy, by dispatcher name."""
    features: ClassVar[Sequence[Feature]] = ()
    """The changes to torch that are made when a region with the recipe is first entered."""
    loaders: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """For each setting that policy files have as a path, relative to their folder, the function that returns the object
    in a file, as ``module:function``. The object has a ``saved_path()``."""
    _defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    _expected: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The values or the type that `read_setting` accepts, by setting."""

    ops: Sequence[str] = ()
    min_size: int = 0
    text: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        declared = fields(dataclass(frozen=True, eq=False, repr=False)(cls))  # type: ignore[arg-type]
        for each in declared:
            if each.default is MISSING:
                raise TypeError(f"{cls.__name__}.{each.name} needs a default: a recipe's name stands for its defaults")
        hints = get_type_hints(cls)
        cls._defaults = {field.name: field.default for field in declared}
        cls._expected = {field.name: recipe_settings.expectation(hints[field.name]) for field in declared}
        recipe_settings.check_words(cls.__name__, cls._defaults, cls.named_settings())
        kind = vars(cls).get("kind")
        if kind is not None:
            _define(cls, kind)
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

    def resolved(self, device_type: str, measure: bool) -> "Recipe":
        """Return the recipe with what it takes from this machine. A subclass may override it; others return themselves.

        What it returns is kept, for equal arguments and a number of threads, until :func:`polycast.plugin.refresh`.

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
        kind = text.partition("(")[0]
        settings = recipe_settings.settings_in(text)
        if (of_kind := find_kind(kind)) is None:
            raise KeyError(kind)
        recipe: Recipe = restored(of_kind, settings)
        return recipe

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, by name."""
        return {name: getattr(self, name) for name in self._defaults}

    def known(self, name: str) -> Any:
        """Return a setting; None if it is an object of which this process knows only the digest."""
        return None if isinstance(value := resolve(getattr(self, name)), ObjectDigest) else value

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
                others[name] = self._path_of(name, value)
            elif isinstance(value, tuple):
                others[name] = list(value)
        return {"recipe": self.short, **others} if others else self.short

    def _path_of(self, name: str, value: Any) -> str:
        if not hasattr(value, "saved_path"):
            raise ValueError(
                f"{self!r} cannot be written: its {name} is an object. A policy file has texts and numbers only, "
                "such as the path of a saved one, where the recipe takes that. A Policy made in Python can have it"
            )
        try:
            return str(value.saved_path())
        except ValueError as error:
            raise ValueError(f"{self!r} cannot be written: {error}") from None

    def with_options(self, **options: Any) -> Self:
        """Return the recipe with other settings.

        Raises:
            TypeError, ValueError: a setting is invalid.
        """
        for name in sorted(options.keys() - self._defaults.keys()):
            raise TypeError(f"{type(self).__name__} has no setting {name!r}: {hint(name, self._defaults)}")
        return restored(type(self), {**self.settings, **options})

    @classmethod
    def named_settings(cls) -> dict[str, tuple[str, ...]]:
        """Return the settings that are part of names, with the values that they can have."""
        choices = {name: values for name, values in cls._expected.items() if isinstance(values, tuple)}
        return {name: values for name, values in choices.items() if all(isinstance(each, str) for each in values)}

    def _changed(self) -> dict[str, Any]:
        """Return the settings other than the defaults."""
        default = restored(type(self), {}).settings
        return {name: value for name, value in self.settings.items() if value != default[name]}

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

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), self.settings)


def restored(kind: type[_Class], settings: Mapping[str, Any]) -> _Class:
    """Return a recipe with these settings, and the defaults of others, without calling a subclass's constructor."""
    recipe = object.__new__(kind)
    for name, default in kind._defaults.items():
        object.__setattr__(recipe, name, settings.get(name, default))
    recipe.__post_init__()
    return recipe


class NoRecipe(Recipe):
    """No recipe: in a region inside one with a recipe, policies apply as usual."""

    kind = "none"


RecipeLike: TypeAlias = Recipe | str
"""The type of every ``recipe=`` argument: a recipe, or a name, such as ``"int8:tensor"`` or ``"none"``."""


def find_kind(name: str) -> Any:
    """Return the class of a kind of recipes, which may be that of a plugin; None if there is none.

    Raises:
        RuntimeError: the plugin that has it is broken, or several have it.
    """
    from .manifests import manifests  # most programs use no recipe

    found = None if name in kinds else manifests().find("recipes", name)  # which imports it
    if found is not None and name not in kinds:
        raise RuntimeError(
            f"A plugin names {found!r} as the recipe {name!r}, whose kind is another. Repair the plugin."
        )
    return kinds.get(name)


def _all_kinds() -> dict[str, Any]:
    """Return the classes of recipes by kind, with those of plugins; warn of those that cannot be used."""
    from .manifests import manifests

    for name in {name for each in manifests() for name in each.plugin.recipes}:
        try:
            find_kind(name)
        except RuntimeError as error:
            warn_user(str(error))
    return kinds


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
    kind, *words = recipe.split(":")
    setting_of = {} if of_kind is None else _words(of_kind)
    settings = {setting_of[word]: word for word in words if word in setting_of}
    if of_kind is not None and len(settings) == len(words):
        return restored(of_kind, settings)
    from .manifests import remedy

    if of_kind is None and (whose := remedy(kind)):
        raise ValueError(f"{recipe!r} is not a recipe{whose}")
    names = [name for known, each in _all_kinds().items() for name in (known, *(f"{known}:{w}" for w in _words(each)))]
    raise ValueError(f"{recipe!r} is not a recipe: {hint(recipe, names)}")


def _words(kind: type[Recipe]) -> dict[str, str]:
    """Return the words that names of a kind may have, with their settings."""
    return {word: setting for setting, words in kind.named_settings().items() for word in words}


def all_recipes() -> list[Recipe]:
    """Return a recipe of each kind that is known, those of plugins included, except "none"; with its defaults."""
    return [restored(kind, {}) for name, kind in _all_kinds().items() if name != NoRecipe.kind]
