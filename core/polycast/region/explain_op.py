"""``explain_op``: what autocast does to an op in this thread's region, and which rule decides it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from ..engine import state
from ..engine.kernels import autocast_key, installed, refusal
from ..engine.override import Override
from ..engine.recipes.plan import plan_of
from ..engine.reference.rules import RULES, OpCall, is_eligible, tensors_in
from ..engine.state import Settings
from ..policy.cast_policy import CastPolicy, registrations
from ..policy.matching import Targets
from ..policy.names import OpName, known_overloads, read_op
from ..policy.recipe import RecipeLike, read_recipe
from ..policy.schemas import existing_op, flatten_arguments
from ..policy.value import PolicyLike
from ..registry.backend import Backend
from ..registry.registry import registry
from ..torch_internals.dispatcher import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    has_kernel_for_dispatch_key,
    resolve_packet,
)
from .explanation import MIXED_DTYPES, NO_RULE, OTHERS_KERNEL, Argument, Explanation
from .resolve import override_of

Op: TypeAlias = str | OpOverload | OpOverloadPacket | CustomOpDef
_Rule: TypeAlias = tuple[CastPolicy | None, str, str]


def explain_op(
    op: Op,
    device_type: str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    policy: PolicyLike | None = None,
    recipe: RecipeLike | None = None,
    enabled: bool | None = None,
) -> Explanation:
    """Return what autocast does to an op in this thread's region for a device, and which rule decides it.

    Nothing is computed. :func:`polycast.explain` is for users.

    Args:
        op: the op, itself or by a name as in a :class:`polycast.Policy`.
        device_type: the device whose autocast decides.
        args, kwargs: arguments of the op, to tell the dtype of each tensor; they may be fake, and a tensor on ``meta``
            counts as on the device. Without any, only the rule is told, for each overload of the name.
        policy, recipe: those of a region inside this thread's.
        enabled: whether that is enabled; None: if autocast is. The device need not be present.

    Raises:
        TypeError: the op does not take the arguments, or is of another type.
        ValueError: torch has no such op; or the policy or the recipe is invalid.
        ValueError, RuntimeError: as :func:`get_backend`.
    """
    backend = registry.find(device_type)
    device_type = backend.device_type
    override, cache = state.machine.innermost(device_type)
    own = override_of(policy, device_type, None if recipe is None else read_recipe(recipe))
    region = Settings(
        device_type,
        torch.is_autocast_enabled(device_type) if enabled is None else enabled,
        state.current_dtype(device_type, backend.default_dtype),
        override=override if own is None else own.over(override),
        cache=cache,
    )
    name = read_op(op)
    if not args and not kwargs:
        found = [_without_arguments(each, region, backend) for each in known_overloads(name)]
        found.sort(key=lambda each: each.policy is None)
        return replace(found[0], others=tuple(found[1:]))
    chosen = _overload_for(name, args, dict(kwargs))
    bound = _bound(chosen, args, dict(kwargs))
    call = _with_arguments(_without_arguments(chosen, region, backend), bound, backend)
    return _with_recipe(call, bound, region) if call.recipe and call.enabled and call.reached else call


def _with_recipe(call: Explanation, bound: dict[str, Any], region: Settings) -> Explanation:
    """Return the explanation of a call that the recipe of the region may compute."""
    plan = None if region.override is None else plan_of(region.override, region.device_type)
    if plan is None:
        return call
    computed = plan.explain(call.op, flatten_arguments(existing_op(call.op), (), bound), region.cache, region.dtype)
    if isinstance(computed, str):
        return replace(call, declined=computed)
    call = replace(call, way=computed.way, reason=computed.reason, package=computed.package)
    if computed.dtype is region.dtype:
        return call
    seen = (replace(each, seen=computed.dtype or each.dtype) for each in call.arguments or ())
    return replace(call, arguments=tuple(seen))


def _without_arguments(op: str, region: Settings, backend: Backend) -> Explanation:
    policy, rule, rule_name = _deciding_rule(op, region.device_type, region.override, backend)
    found = Explanation(op, region.device_type, region.enabled, region.dtype, policy, rule, rule_name, calls=op)
    override = region.override
    if override is None or override.recipe is None or op not in override.recipe_ops:
        return found
    has_policy = policy not in (None, CastPolicy.MATCH)
    if policy is not CastPolicy.LOWER_PRECISION_FP and (has_policy or op not in override.recipe.without_policy):
        return found
    plan = plan_of(override, region.device_type)
    declined = None if plan is None else plan.why_no_kernel(op)
    return replace(found, recipe=override.recipe.short, declined=declined)


def decide(op: str, device_type: str, override: Override | None = None) -> _Rule:
    """Return the policy of an op in a region that is enabled, the rule that decides it, and the name of that rule.

    Args:
        op: an overload, by its name in the dispatcher.
        device_type: the device of the region.
        override: the policies of the region, as the native engine knows them; None: it has none.

    Returns:
        The policy, or None if the op runs unchanged; the rule, as in :class:`polycast.Explanation`; its name, or "".
    """
    try:
        backend = registry.find(device_type)
    except RuntimeError:  # there is none, or it is broken: the region is torch's
        backend = None
    if backend is None or device_type not in installed:
        return None, _rule_of_others(op, device_type), ""
    return _deciding_rule(op, device_type, override, backend)


def _rule_of_others(op: str, device_type: str) -> str:
    return OTHERS_KERNEL if has_kernel_for_dispatch_key(op, autocast_key(device_type)) else NO_RULE


def _deciding_rule(op: str, device_type: str, override: Override | None, backend: Backend) -> _Rule:
    """Return the policy of an op, the rule that decides it, and the name of that: the innermost rule for the op."""
    if override is not None and (origin := override.origin_of(op)) is not None:
        return override.policies[op], *origin
    for scope, rule in ((device_type, f"register_op for {device_type}"), (None, "register_op")):
        for registration in registrations:
            if registration.device_type == scope and op in registration.ops:
                return registration.policy, rule, ""
    if op in backend.policies:
        return backend.policies[op], "backend's table", ""
    if (added := registry.added_policies(backend).get(op)) is not None:
        return added.policy, "extension", added.distribution
    if op in backend.matched_ops:
        return CastPolicy.MATCH, MIXED_DTYPES, ""
    kernels = installed.get(device_type)
    is_own = kernels is not None and op in kernels.ops
    return None, NO_RULE if is_own else _rule_of_others(op, device_type), ""


def _overload_for(name: OpName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the overload that a call resolves to; raise TypeError if none takes these arguments."""
    overloads = known_overloads(name, writing=True)
    if len(overloads) == 1:
        return overloads[0]
    if resolve_packet is None:
        raise TypeError(
            f"{name.short!r} has several overloads, and this torch ({torch.__version__}) does not tell which one a "
            f"call means: name it, one of {overloads}"
        )
    # torch accepts one number for a list of fixed length; its overload resolution does not, for SymInt[n].
    for some_args, some_kwargs in ((args, kwargs), *(_with_lists(each, args, kwargs) for each in overloads)):
        try:
            overload = resolve_packet(name.qualified, *some_args, **some_kwargs)
        except RuntimeError:
            continue
        found = f"{name.qualified}.{overload}" if overload != "default" else name.qualified
        if found in overloads:
            return found
    raise _does_not_take(name.short, overloads)


def _with_lists(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of an op with numbers repeated into lists, where its schema has lists of fixed length."""
    arguments = existing_op(op)._schema.arguments

    def as_list(argument: Any, value: Any) -> Any:
        is_one = type(value) is int or isinstance(value, torch.SymInt)
        if not is_one or argument is None or argument.N is None or "List[int]" not in str(argument.type):
            return value
        return [value] * argument.N

    by_name = {each.name: each for each in arguments}
    return (
        [as_list(argument, value) for argument, value in zip_longest(arguments[: len(args)], args)],
        {name: as_list(by_name.get(name), value) for name, value in kwargs.items()},
    )


def _does_not_take(name: str, overloads: Iterable[str]) -> TypeError:
    schemas = "; ".join(str(existing_op(each)._schema) for each in overloads)
    return TypeError(f"{name!r} does not take these arguments. Its schemas: {schemas}")


def _bound(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the op's schema."""
    arguments = existing_op(op)._schema.arguments
    names = [argument.name for argument in arguments]
    lists, named_lists = _with_lists(op, args, kwargs)
    bound = {**dict(zip(names, lists, strict=False)), **named_lists}
    required = [argument.name for argument in arguments if not argument.has_default_value()]
    if len(args) > len(names) or len(bound) != len(args) + len(kwargs) or not set(required) <= set(bound) <= set(names):
        raise _does_not_take(op, [op])
    return bound


def _with_arguments(found: Explanation, bound: dict[str, Any], backend: Backend) -> Explanation:
    overload = existing_op(found.op)
    reached = any(_is_on(tensor, found.device_type) for tensor in tensors_in(bound.values()))
    policy = found.policy if found.enabled and reached else None
    banned = policy is CastPolicy.BANNED

    def may_cast(value: object) -> bool:
        if not isinstance(value, torch.Tensor) or not _is_on(value, found.device_type):
            return False
        return is_eligible(value, value.device.type)

    missing = backend.missing_dtypes(found.op, () if policy is CastPolicy.MATCH else bound.values())
    call = OpCall(overload, (), bound, missing=missing)
    if policy is not None and not banned:
        call = RULES[policy](call, found.dtype, may_cast)
    matched = dict(zip((each.name for each in overload._schema.arguments), call.targets, strict=False))
    dtypes = (value for name, value in call.kwargs.items() if bound.get(name) is None)
    positions = {each.name: at for at, each in enumerate(overload._schema.arguments)}

    def seen(argument: str, tensor: torch.Tensor) -> torch.dtype:
        is_cast = call.dtype is not None and may_cast(tensor) and call.casts(positions[argument])
        return call.dtype if call.dtype is not None and is_cast else tensor.dtype

    return replace(
        found,
        arguments=tuple(
            Argument(name, tensor.dtype, target or seen(argument, tensor))
            for argument, value in bound.items()
            for name, tensor, target in _tensors(argument, value, matched.get(argument))
        ),
        reached=reached,
        set_dtype=next((dtype for dtype in dtypes if isinstance(dtype, torch.dtype)), None),
        calls=found.op if call.op is overload else str(call.op.name()),  # type: ignore[no-untyped-call]
        refusal=refusal(backend, found.op) if banned else None,
    )


def _tensors(name: str, value: object, targets: Targets) -> Iterator[tuple[str, torch.Tensor, torch.dtype | None]]:
    """Yield the tensors of an argument by name, each with the dtype that MATCH casts it to or None."""
    if isinstance(value, torch.Tensor):
        yield name, value, targets if isinstance(targets, torch.dtype) else None
    elif isinstance(value, (list, tuple)):
        by_item = targets if isinstance(targets, list) else [None] * len(value)
        for position, (item, target) in enumerate(zip(value, by_item, strict=True)):
            yield from _tensors(f"{name}[{position}]", item, target)


def _is_on(tensor: torch.Tensor, device_type: str) -> bool:
    return tensor.device.type in (device_type, "meta")
