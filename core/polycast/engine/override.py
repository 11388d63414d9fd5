"""Policy overrides: the policies and the recipe that regions merge over a backend's table.

Overrides are interned, so that what the engines make of one is made once: regions for a device whose policies, recipe
and enclosing override are equal share it.
"""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common.cached_property import cached_property
from ..policy.cast_policy import CastPolicy
from ..policy.schemas import COMPOSED_OPS
from ..torch_internals.private_names import disable_dynamo

if TYPE_CHECKING:
    from ..policy.recipe import Recipe


class PolicyOrigin(NamedTuple):
    """The origin of an override: the kind of rule, and its name, if it has one."""

    rule: str
    name: str = ""


REGIONS_POLICY = "region's policy"
MODULE_RULE = "module rule"


class Override:
    """The policies and the recipe of regions for a device, with those of the regions around them merged in.

    A policy for an op, in any layer, takes the op away from the recipe, in any layer.

    Attributes:
        policies: by op, its policy.
        recipe: that of the innermost layer that has one; None if none has.
        origin: the origin of the innermost layer.
        layers: the overrides that this one is merged of, each of one origin, the innermost first.
        native: the native engine's copy of it.
        plan: the recipe's kernels on the device.
        ready_key: the kernels that were last installed for its ops; see :data:`polycast.engine.state.ready`.
    """

    def __init__(
        self,
        device_type: str,
        policies: Iterable[tuple[str, CastPolicy]],
        origin: PolicyOrigin,
        recipe: "Recipe | None",
        layers: "tuple[Override, ...]" = (),
    ) -> None:
        self.device_type = device_type
        self.policies = dict(policies)
        self.origin = origin
        self.recipe = recipe
        self.layers = layers or (self,)
        self.native: Any = None
        self.plan: Any = None
        self.ready_key: object = None

    def origin_of(self, op: str) -> PolicyOrigin | None:
        """Return the origin of the policy of an op, if it has one here."""
        return next((layer.origin for layer in self.layers if op in layer.policies), None)

    @cached_property
    def recipe_ops(self) -> frozenset[str]:
        """The ops that the recipe computes, by their names in the dispatcher.

        With policies, composed ops are not among them: a policy may be for an op that a composed op calls.
        """
        if self.recipe is None:
            return frozenset()
        return self.recipe.overloads - self.policies.keys() - (COMPOSED_OPS if self.policies else frozenset())

    @cached_property
    def added(self) -> frozenset[str]:
        """The ops that need a kernel whether or not they are in the backend's table."""
        if self.recipe is None:
            return frozenset(self.policies)
        return (self.recipe_ops & self.recipe.without_policy - COMPOSED_OPS).union(self.policies)

    @disable_dynamo
    def over(self, parent: "Override | None") -> "Override":
        """Return this override merged over that of an enclosing region."""
        if parent is None:
            return self
        for layer in reversed(self.layers):
            parent = make_override(self.device_type, *layer._key, parent)
        return parent

    @cached_property
    def _key(self) -> tuple[frozenset[tuple[str, CastPolicy]], str, str, "Recipe | None"]:
        return frozenset(self.policies.items()), *self.origin, self.recipe

    @cached_property
    def text(self) -> str:
        """The policies and the recipe as text: the same for equal ones, in every process."""
        policies = ", ".join(f"{op}={policy.name}" for op, policy in sorted(self.policies.items()))
        return f"({policies})" + ("" if self.recipe is None else self.recipe.text)

    @classmethod
    def of_text(cls, device_type: str, text: str, rule: str, name: str) -> "Override":
        """Return the override that has a `text`."""
        policies, _, recipe = text[1:].partition(")")
        entries = (entry.rpartition("=") for entry in policies.split(", ") if entry)
        from ..policy.recipe import Recipe  # most programs use none

        key = frozenset((op, CastPolicy[policy]) for op, _, policy in entries)
        return make_override(device_type, key, rule, name, Recipe.of_text(recipe) if recipe else None, None)

    def __repr__(self) -> str:
        return f"<override for {self.device_type!r}: {self.text}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.device_type, *(layer._key for layer in self.layers))


@functools.lru_cache(maxsize=512)
def make_override(
    device_type: str,
    policies: frozenset[tuple[str, CastPolicy]],
    rule: str,
    name: str,
    recipe: "Recipe | None",
    parent: Override | None,
    /,
) -> Override:
    """Return the override of a region, merged over `parent`, that of the region around it."""
    origin = PolicyOrigin(rule, name)
    if parent is None:
        return Override(device_type, policies, origin, recipe)
    own = make_override(device_type, policies, rule, name, recipe, None)
    others = [layer for layer in parent.layers if layer is not own]
    # A decorated function that recurs merges its override over itself, at every depth.
    if len(others) < len(parent.layers) and parent.policies.items() >= policies and recipe in (None, parent.recipe):
        return parent
    # Rules for modules go before what regions inside the modules ask for.
    layers = sorted((own, *others), key=lambda layer: layer.origin.rule != MODULE_RULE)
    merged = {op: policy for layer in reversed(layers) for op, policy in layer.policies.items()}
    merged_recipe = next((layer.recipe for layer in layers if layer.recipe is not None), None)
    return Override(device_type, merged.items(), origin, merged_recipe, tuple(layers))


def _restored(device_type: str, *layers: tuple[Any, ...]) -> Override:
    """Return a copied or unpickled override."""
    merged = None
    for layer in reversed(layers):
        merged = make_override(device_type, *layer, merged)
    assert merged is not None  # there is a layer
    return merged
