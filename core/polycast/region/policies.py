"""What a region lays over the backend's table, from whatever was given as ``policy=`` and ``recipe=``.

A program makes few policies and many regions. So what was made of a Policy is kept with it; and the policies of the
last mappings are kept by their items, those of the last files by what the file system says of them.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

from ..engine.state import MODULE_RULE, REGIONS_POLICY, Origin, Override
from ..policy.op_policies import OpPolicies
from ..policy.recipe import Recipe
from ..policy.value import Policy, PolicyLike

_KEPT = 256
_NONE: tuple[int, Override | None] = (-1, None)
_by_items: dict[tuple[Any, ...], Policy] = {}


def override_of(policy: PolicyLike, device_type: str) -> Override | None:
    """Return the override of a region for a device; None where the policy says nothing of ops there.

    Raises:
        ValueError: the policy has rules for modules.
        OSError, ValueError: as :meth:`polycast.Policy.of`.
    """
    if not isinstance(policy, Policy):
        policy = _kept(policy)
    part = policy.for_device(device_type)
    found = part.ops.resolved
    count: int
    override: Override | None
    count, override = part.derived.get(Override, _NONE)
    if count != len(found):  # not looked up yet, or a library was loaded since that has an optional op
        if policy.has_module_rules:
            raise ValueError(
                "policy= has rules for modules, and a region does not see which module calls an op: put the model "
                "under the policy with polycast.apply_policy(model, policy), and leave policy= out."
            )
        override = _override(part.ops, REGIONS_POLICY._replace(name=part.name), len(found)) if found else None
        part.derived[Override] = len(found), override
    return override


def with_recipe(override: Override | None, recipe: Recipe) -> Override:
    """Return an override with a recipe more: one and the same for the same two, as long as there are both."""
    origin = REGIONS_POLICY if override is None else override.origin
    made: Override | None
    of, made = recipe.derived.get(Override, (None, None))
    if made is None or of is not override:
        made = Override(override or {}, origin, recipe=recipe)
        recipe.derived[Override] = override, made
    return made


def override_of_rule(ops: OpPolicies, name: str, recipe: Recipe | None = None) -> Override | None:
    """Return the override of the region that a rule for a module opens, by the name of the rule."""
    found = ops.resolved
    origin = MODULE_RULE._replace(name=name)
    if recipe is not None:
        return Override(found, origin, recipe=recipe)
    return _override(ops, origin, len(found)) if found else None


@functools.lru_cache(maxsize=_KEPT)
def _override(ops: OpPolicies, origin: Origin, _found: int) -> Override:
    """Return an override: one and the same for equal policies, as long as it is kept."""
    return Override(ops.resolved, origin)


def _kept(policy: Mapping[Any, Any] | str | os.PathLike[str]) -> Policy:
    if isinstance(policy, (str, os.PathLike)):
        status = os.stat(policy)
        return _loaded(os.path.abspath(policy), status.st_mtime_ns, status.st_size, status.st_ino)
    try:
        items = tuple(policy.items())
        found = _by_items.get(items)
    except (AttributeError, TypeError):  # not a mapping, which Policy says; or a value that has no hash
        return Policy.of(policy)
    if found is None:
        found = Policy.of(policy)
        # What other libraries define, they may define anew.
        if all(name.startswith("aten::") for name in found.ops.resolved):
            if len(_by_items) >= _KEPT:
                _by_items.clear()
            _by_items[items] = found
    return found


@functools.lru_cache(maxsize=_KEPT)
def _loaded(path: str, *status: int) -> Policy:
    return Policy.load(path)
