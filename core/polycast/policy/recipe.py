"""`Recipe`: how to compute ops with the policy LOWER_PRECISION_FP, such as matmuls in a lower precision."""

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias
from urllib.parse import unquote

from typing_extensions import Self

from .names import hint, known_overloads, read_op
from .recipe_arguments import MATMULS, PRODUCTS, quoted, read_ops

_SCALES = ("row", "tensor")
_kinds: dict[str, type["Recipe"]] = {}
_MACHINES, _FILE = "machine", "file:"
_profiles: dict[str, Any] = {}
"""The profiles of this process's recipes, by digest."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Recipe:
    """How a region computes ops with the policy LOWER_PRECISION_FP: in a lower precision, or the fastest way.

    An immutable value for ``polycast.autocast(..., recipe=...)``. Outputs have the fast dtype, and ops without a kernel
    for the recipe compute in it. To compute a module in the fast dtype, give it the rule ``"none"``
    (:func:`apply_policy`). Recipes with equal settings are equal, and can be made in compiled code.

    A subclass defines its own `kind`, which backends query.

    Args:
        scales: ``"row"``: a scale for each row of the activations and each output feature; ``"tensor"``: one scale for
            all activations.
        ops: the ops to compute by the recipe if the backend has a kernel, by names as in a :class:`Policy`.
        min_size: the smallest number of elements of a weight for which the recipe is used.

    Raises:
        TypeError: `ops` are not names, or `min_size` is not an int.
        ValueError: `scales` is neither; torch has no such op; or `min_size` is negative.
    """

    kind: ClassVar[str]
    default_min_size: ClassVar[int] = 0
    needs_kernels: ClassVar[bool] = True
    """Whether a device supports the recipe only if its backend says so."""
    table_keys: ClassVar[tuple[str, ...]] = ("ops", "min_size")
    """The settings that a table in a policy file may have."""

    scales: str
    ops: tuple[str, ...]
    min_size: int
    text: str
    """The settings as a line of text, the same in every process for equal recipes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        kind = vars(cls).get("kind")
        if isinstance(kind, str):
            _kinds[kind] = cls

    def __init__(self, scales: str = "row", ops: Iterable[str] = MATMULS, min_size: int | None = None) -> None:
        # Dynamo traces this and the functions that it calls.
        if not hasattr(self, "kind"):
            raise TypeError(f"{type(self).__name__} is no kind of recipe: use one such as polycast.Int8")
        if scales not in _SCALES:
            raise ValueError(f"scales must be 'row' or 'tensor', got {scales!r}")
        if min_size is None:
            min_size = self.default_min_size
        if isinstance(min_size, bool) or not isinstance(min_size, int):
            raise TypeError(f"min_size must be an int, a number of elements, got {min_size!r}")
        if min_size < 0:
            raise ValueError(f"min_size must not be negative, got {min_size}")
        named = read_ops(ops)
        text = f"{self.kind} {scales} {','.join(named)} {min_size}"
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "ops", named)
        object.__setattr__(self, "min_size", min_size)
        object.__setattr__(self, "text", text)

    @classmethod
    def of_text(cls, text: str) -> "Recipe":
        """Return the recipe with a `text`."""
        kind, *settings = text.split(" ")
        if not settings:
            return _kinds[kind]()
        first, ops, min_size = settings
        return _kinds[kind]._of_text(first, tuple(ops.split(",")) if ops else (), int(min_size))

    @classmethod
    def _of_text(cls, first: str, ops: tuple[str, ...], min_size: int) -> "Recipe":
        return _restored(cls, first, ops, min_size)

    @property
    def derived(self) -> dict[Any, Any]:
        """Objects that other modules derived from equal recipes, each under a key that has its type."""
        found: dict[Any, Any] | None = vars(self).get("_derived")
        if found is None:
            found = vars(self)["_derived"] = _derived(self.text)  # this recipe's, also once the table has dropped it
        return found

    @property
    def overloads(self) -> frozenset[str]:
        """The ops to compute by the recipe, by dispatcher name."""
        return frozenset(name for op in self.ops for name in known_overloads(read_op(op)))

    @property
    def short(self) -> str:
        """The name, which has the kind and the scales, such as ``"int8"`` or ``"int8:tensor"``."""
        return self.kind if self.scales == "row" else f"{self.kind}:{self.scales}"

    @property
    def written(self) -> str | dict[str, Any]:
        """The recipe as in a policy file: its name, or a table if it has other settings."""
        if self == type(self)(self.scales):
            return self.short
        return {"recipe": self.short, "ops": list(self.ops), "min_size": self.min_size}

    def with_options(self, **options: Any) -> "Recipe":
        """Return the recipe with other settings, those of `table_keys`."""
        return type(self)(self.scales, **options)

    def __eq__(self, other: object) -> bool:
        return (type(self), self.text) == (type(other), other.text) if isinstance(other, Recipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        arguments = [] if self.scales == "row" else [f"scales={self.scales!r}"]
        arguments += [] if self.ops == MATMULS else [f"ops={self.ops!r}"]
        arguments += [] if self.min_size == self.default_min_size else [f"min_size={self.min_size}"]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.scales, self.ops, self.min_size)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Int8(Recipe):
    """Matmuls of 8-bit integers, for inference; see :class:`Recipe` for the arguments.

    Weights are prepacked once, with a scale for each output feature; activations are quantized at each call. Ops that
    autograd records run in the fast dtype.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(1024, 1024)
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8()):  # doctest: +SKIP
        ...     model(torch.randn(1, 1024)).dtype
        torch.bfloat16
    """

    kind = "int8"
    default_min_size = 2**16


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Float8(Recipe):
    """Matmuls of 8-bit floats (e4m3), for inference; see :class:`Recipe` for the arguments. Experimental."""

    kind = "float8"
    default_min_size = 2**22


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Fastest(Recipe):
    """Matmuls and convolutions, each computed the fastest way that is at least as exact as the fast dtype.

    A profile (:func:`polycast.profile`) says how long each takes. The ways are

    - torch's kernel for the fast dtype, with the weight's cached cast, as without a recipe;
    - the backend's own kernel for the fast dtype, with the same cast, or with the float32 weight as it is;
    - float32: the weight as it is, neither cast nor cached, and the activations converted.

    Outputs have the fast dtype. In training, forward and backward are chosen separately, and activations are saved in
    the fast dtype. The choice depends on the op, on the sizes of its arguments up to a factor of two, on their dtypes,
    on whether autograd records it, and on whether the weight's cast will be found in a cache.

    Args:
        profile: a :class:`DeviceProfile`, or the path of a saved one, so that choices are the same on every machine.
            None: the profile of this machine, which the first region measures if there is none.
        ops: the ops to compute the fastest way, by names as in a :class:`Policy`; of these, the ones with the policy
            LOWER_PRECISION_FP.
        min_size: the smallest number of elements of a weight, or of the second matrix, for which to choose.

    Raises:
        TypeError: `profile` is neither; `ops` are not names; or `min_size` is not an int.
        ValueError: torch has no such op; or `min_size` is negative.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(1024, 1024)
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Fastest()):  # doctest: +SKIP
        ...     model(torch.randn(1, 1024)).dtype
        torch.bfloat16
    """

    kind = "fastest"
    needs_kernels = False
    table_keys = ("profile", "ops", "min_size")

    profile: Any
    """As given; None also if it is one that this process does not know, and the recipe was made of its text."""

    def __init__(self, profile: Any = None, ops: Iterable[str] = PRODUCTS, min_size: int = 0) -> None:
        super().__init__(ops=ops, min_size=min_size)
        if profile is None:
            name = _MACHINES
        elif isinstance(profile, (str, os.PathLike)):
            profile = os.fspath(profile)
            name = _FILE + quoted(profile)
        elif isinstance(getattr(profile, "digest", None), str):
            name = profile.digest
            _profiles[name] = profile
        else:
            raise TypeError(f"profile must be a DeviceProfile, the path of a saved one, or None, got {profile!r}")
        object.__setattr__(self, "profile", profile)
        object.__setattr__(self, "text", f"{self.kind} {name} {','.join(self.ops)} {self.min_size}")

    @classmethod
    def _of_text(cls, first: str, ops: tuple[str, ...], min_size: int) -> Recipe:
        if first == _MACHINES or first.startswith(_FILE):
            return _restored(cls, None if first == _MACHINES else unquote(first.removeprefix(_FILE)), ops, min_size)
        recipe = _restored(cls, _profiles.get(first), ops, min_size)
        object.__setattr__(recipe, "text", f"{cls.kind} {first} {','.join(ops)} {min_size}")
        return recipe

    @property
    def is_of_machine(self) -> bool:
        """Whether the profile is the one of the machine that it is used on."""
        return self.text.split(" ")[1] == _MACHINES

    @property
    def short(self) -> str:
        """The name."""
        return self.kind

    @property
    def written(self) -> str | dict[str, Any]:
        """The recipe as in a policy file: its name, or a table if it has other settings.

        Raises:
            ValueError: it has a profile that is not given by path.
        """
        if self == type(self)():
            return self.kind
        table: dict[str, Any] = {"recipe": self.kind, "ops": list(self.ops), "min_size": self.min_size}
        if self.profile is not None:
            if not isinstance(self.profile, str):
                raise ValueError(f"{self!r} cannot be written: save its profile, and give the path, as a str")
            table["profile"] = self.profile
        return table

    def with_options(self, **options: Any) -> Recipe:
        """Return the recipe with other settings, those of `table_keys`."""
        return type(self)(**options)

    def __repr__(self) -> str:
        arguments = []
        if isinstance(self.profile, str):
            arguments.append(repr(self.profile))
        elif not self.is_of_machine:
            arguments.append(f"<profile {self.text.split(' ')[1]}>")
        arguments += [] if self.ops == PRODUCTS else [f"ops={self.ops!r}"]
        arguments += [] if self.min_size == 0 else [f"min_size={self.min_size}"]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.profile is None and not self.is_of_machine:
            return Recipe.of_text, (self.text,)
        return _restored, (type(self), self.profile, self.ops, self.min_size)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class NoRecipe(Recipe):
    """The fast dtype for every op, in a region inside one with a recipe."""

    kind = "none"

    def __init__(self) -> None:
        super().__init__(ops=())
        object.__setattr__(self, "text", self.kind)

    @property
    def written(self) -> str:
        """The name."""
        return self.kind

    def __repr__(self) -> str:
        return "NoRecipe()"

    def __reduce__(self) -> tuple[Any, ...]:
        return NoRecipe, ()


def _restored(kind: type[Recipe], *fields: Any) -> Recipe:
    """Return a recipe with these fields, without calling a subclass's constructor."""
    recipe = object.__new__(kind)
    vars(Fastest if issubclass(kind, Fastest) else Recipe)["__init__"](recipe, *fields)
    return recipe


RecipeLike: TypeAlias = Recipe | str
"""The type of every ``recipe=`` argument: a recipe, or a name, such as ``"fastest"``, ``"int8:tensor"``, ``"none"``."""

_UNSCALED = (Fastest.kind, NoRecipe.kind)


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
        raise TypeError(f"recipe must be a Recipe such as polycast.Int8(), its name, or None, got {recipe!r}")
    return _of_name(recipe)


@functools.lru_cache(maxsize=64)
def _of_name(recipe: str) -> Recipe:
    kind, colon, scales = recipe.partition(":")
    if kind not in _kinds or (colon and (kind in _UNSCALED or scales not in _SCALES)):
        known = [each for kind in _kinds for each in ([kind] if kind in _UNSCALED else [kind, f"{kind}:tensor"])]
        raise ValueError(f"{recipe!r} is not a recipe: {hint(recipe, known)}")
    return _kinds[kind](scales) if colon else _kinds[kind]()


def all_recipes() -> list[Recipe]:
    """Return a recipe of each kind except "none", with the default settings."""
    return [_restored(kind) for name, kind in _kinds.items() if name != NoRecipe.kind]


def is_recipe_name(text: str) -> bool:
    """Return whether a text names a recipe."""
    return text.partition(":")[0] in _kinds


@functools.lru_cache(maxsize=64)
def _derived(text: str) -> dict[Any, Any]:
    return {}
