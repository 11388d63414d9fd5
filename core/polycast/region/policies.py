"""What a region lays over the backend's table, from whatever was given as ``policy=`` and ``recipe=``.

A program makes few policies and many regions. So what was made of a Policy is kept with it; and the policies of the
last mappings are kept by their items, those of the last files by what the file system says of them.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

from ..engine.state import MODULE_RULE, REGIONS_POLICY, Origin, Overlay
from ..policy.ops import Ops
from ..policy.recipes import Recipe
from ..policy.value import Policy, PolicyLike

_KEPT = 256
_NONE: tuple[int, Overlay | None] = (-1, None)
_by_items: dict[tuple[Any, ...], Policy] = {}


def overlay_of(policy: PolicyLike, device_type: str) -> Overlay | None:
    """Return the overlay of a region for a device; None where the policy says nothing of ops there.

    Raises:
        ValueError: the policy has rules for modules.
        OSError, ValueError: as :meth:`polycast.Policy.of`.
    """
    if not isinstance(policy, Policy):
        policy = _kept(policy)
    part = policy.for_device(device_type)
    found = part.ops.resolved
    count: int
    overlay: Overlay | None
    count, overlay = part.derived.get(Overlay, _NONE)
    if count != len(found):  # not looked up yet, or a library was loaded since that has an optional op
        if policy.has_module_rules:
            raise ValueError(
                "policy= has rules for modules, and a region does not see which module calls an op: put the model "
                "under the policy with polycast.apply_policy(model, policy), and leave policy= out."
            )
        overlay = _overlay(part.ops, REGIONS_POLICY._replace(name=part.name), len(found)) if found else None
        part.derived[Overlay] = len(found), overlay
    return overlay


def with_recipe(overlay: Overlay | None, recipe: Recipe) -> Overlay:
    """Return an overlay with a recipe more: one and the same for the same two, as long as there are both."""
    origin = REGIONS_POLICY if overlay is None else overlay.origin
    made: Overlay | None
    of, made = recipe.derived.get(Overlay, (None, None))
    if made is None or of is not overlay:
        made = Overlay(overlay or {}, origin, recipe=recipe)
        recipe.derived[Overlay] = overlay, made
    return made


def overlay_of_rule(ops: Ops, name: str, recipe: Recipe | None = None) -> Overlay | None:
    """Return the overlay of the region that a rule for a module opens, by the name of the rule."""
    found = ops.resolved
    origin = MODULE_RULE._replace(name=name)
    if recipe is not None:
        return Overlay(found, origin, recipe=recipe)
    return _overlay(ops, origin, len(found)) if found else None


@functools.lru_cache(maxsize=_KEPT)
def _overlay(ops: Ops, origin: Origin, _found: int) -> Overlay:
    """Return an overlay: one and the same for equal policies, as long as it is kept."""
    return Overlay(ops.resolved, origin)


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
