"""The override of a region, from whatever was given as ``policy=`` and ``recipe=``."""

import functools
import os
from typing import TYPE_CHECKING, Any

from ..engine.override import REGIONS_POLICY, Override, make_override
from ..policy.recipe import Recipe

if TYPE_CHECKING:
    from ..policy.op_policies import OpPolicies
    from ..policy.value import Policy, PolicyLike

_MAX_POLICIES = 256
_policies: "dict[tuple[Any, ...], Policy]" = {}
"""By the items of mappings, and the path and status of files, the policies that were last read from them."""


@functools.cache  # the statement takes longer than the rest of a region
def _policy_class() -> "type[Policy]":
    from ..policy.value import Policy  # most regions have no policy

    return Policy


def override_of(policy: "PolicyLike | None", device_type: str, recipe: Recipe | None = None) -> Override | None:
    """Return the override of a region for a device; None if there is no policy for its ops and no recipe.

    Raises:
        ValueError: the policy has rules for modules.
        OSError, ValueError: as :meth:`polycast.Policy.of`.
    """
    if policy is None:
        return None if recipe is None else make_override(device_type, frozenset(), REGIONS_POLICY, "", recipe, None)
    if not isinstance(policy, _policy_class()):
        policy = _read(policy)
    if policy.has_module_rules:
        raise ValueError(
            "policy= has rules for modules, and a region does not see which module calls an op: put the model "
            "under the policy with polycast.apply_policy(model, policy), and leave policy= out."
        )
    part = policy.for_device(device_type)
    return override_of_ops(device_type, part.ops, REGIONS_POLICY, part.name, recipe)


def override_of_ops(
    device_type: str, ops: "OpPolicies", rule: str, name: str, recipe: Recipe | None
) -> Override | None:
    """Return the override with these policies, of a kind of rule and its name; None without policies and recipe."""
    items = ops.resolved_items
    return make_override(device_type, items, rule, name, recipe, None) if items or recipe is not None else None


def _read(given: Any) -> "Policy":
    """Return a policy that is given as a mapping or a path; the same one while it says the same."""
    is_file = isinstance(given, (str, os.PathLike))
    try:
        if is_file:
            status = os.stat(given)
            # A copy that keeps the time of its source, such as that of rsync, may be written with the old one's.
            times = status.st_mtime_ns, status.st_ctime_ns
            key: tuple[Any, ...] = (os.path.abspath(given), *times, status.st_size, status.st_ino)
        else:
            key = tuple(given.items())
        found = _policies.get(key)
    except (AttributeError, FileNotFoundError, TypeError):  # not a mapping, no file, or a value without a hash
        return _policy_class().of(given)
    if found is None:
        found = _policy_class().of(given)
        # OpPolicies of other libraries may be defined again, with other overloads.
        if is_file or all(name.startswith("aten::") for name in found.ops.resolved):
            if len(_policies) >= _MAX_POLICIES:
                _policies.clear()
            _policies[key] = found
    return found
