"""Module rules: ``apply_policy`` puts the modules of a model under the rules of a policy.

A rule is active while the module's ``forward`` runs, whatever calls it. So the instance gets a ``forward`` of its own,
a callable object that holds the module. Unlike a bound method, an object is copied and pickled with the module, with
its rules. The class of the module, its names, hooks and state_dict do not change.
"""

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from typing_extensions import Self

from ..engine.override import MODULE_RULE, make_override
from ..policy.modules import FP32, OFF, ModuleFinder, ModuleRule
from ..policy.names import read_dtype
from ..policy.op_policies import ModulePolicies, OpPolicies
from ..policy.recipe import Recipe
from ..policy.value import Policy, PolicyLike
from ..torch_internals import changes
from .instance_forward import FORWARD
from .ruled_forward import ANY_DEVICE, Rule, RuledForward, RuleSet


class ModuleRules:
    """The rules that :func:`apply_policy` has put a model under; a context manager that removes them on exit.

    Attributes:
        policy: the policy of the rules.
        rules: by module name, the rule of the module, as text.
        rule_set: identifies them.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rules: dict[str, str] = {}
        self.rule_set = RuleSet()
        self._forwards: list[RuledForward] = []

    def suspend(self) -> None:
        """Make the rules inactive until :meth:`resume`."""
        self._set_suspended(True)

    def resume(self) -> None:
        """Make suspended rules active again."""
        self._set_suspended(False)

    def _set_suspended(self, is_suspended: bool) -> None:
        self.rule_set.is_suspended = is_suspended
        for forward in self._forwards:
            forward.update()

    def remove(self) -> None:
        """Remove the rules; copies of the model keep theirs."""
        while self._forwards:
            self._forwards.pop().keep(lambda rule_set: rule_set is not self.rule_set)
        self.rules = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<rules of polycast.apply_policy for {len(self.rules)} modules>"

    def _put(self, name: str, module: nn.Module, rules: Mapping[str, Rule]) -> None:
        forward = RuledForward.of(module)
        if forward is None:
            forward = RuledForward(module)
            forward.put()
        forward.add(self.rule_set, rules)
        self._forwards.append(forward)
        self.rules[name] = _as_text(rules)


def apply_policy(model: nn.Module, policy: PolicyLike, *, owner: str | None = None) -> ModuleRules:
    """Put a model under the rules of a policy, until they are removed.

    In an enabled region, a module computes as its rule says, and so do the modules inside it that have no rule of their
    own. Outside of regions, rules have no effect. Rules are active while ``forward`` runs: not in hooks, and not in a
    module whose ``forward`` is never called (such as the projection in nn.MultiheadAttention, whose weight another
    function uses).

    The keys of ``policy.modules`` are globs over the names in ``model.named_modules()``: ``*`` matches any characters
    of a part between dots, ``**`` any number of parts, or none: ``"**"`` alone matches every module and the model
    itself, ``""`` the model itself. ``[0-11]`` matches a number in a range, ``{q,k}`` either of two, ``[ab]`` a
    character, and a special character in brackets matches itself, as in ``[*]``. ``"class:torch.nn.LayerNorm"`` matches
    the modules of a class and its subclasses. Of several rules that match, the last one decides. A container without a
    forward (nn.ModuleList) passes its rule on to its modules. A module with several names has one rule: the last that
    matches any of them. The values:

    - ``"fp32"``: autocast is off in the module, and its floating-point inputs are cast to float32 (not float64 ones);
      writes of the module to them are copied back, or raise a RuntimeError if that is impossible;
    - ``"off"``: autocast is off in the module, and its inputs are not cast;
    - a fast dtype, such as ``"float16"``: its ops run in a region with that dtype, even inside a module that a rule
      has switched autocast off for;
    - a recipe, such as ``"int8"``, or ``"none"`` for the fast dtype: replaces the recipe of the region outside, even
      inside a module that a rule has switched autocast off for;
    - policies by op: they override those of regions outside, and of regions inside the module; and, under the key
      ``"output"``, a dtype: the floating-point tensors that the module returns are cast to it (not float64 ones).

    ``policy.ops`` apply to the whole model. If a model is put under rules twice, the later ones decide for the modules
    that both match, until they are removed.

    Args:
        model: the model. Each module under a rule gets a ``forward`` in its ``__dict__``, which is copied and pickled
            with it. A ``copy.copy`` of a module calls the original's.
        policy: a :class:`Policy`, a mapping of ops, or the path of a policy file.
        owner: a name for who applies the rules, such as a package. They replace those that the owner has applied to the
            model, or to the model that it is a copy of.

    Returns:
        The rules, with ``remove()``; a context manager that removes them.

    Raises:
        ValueError: a key matches no module, with the nearest names; or `policy` is invalid, as :class:`Policy` says.
        TypeError: `model` is not a module; or a module that matches is a ScriptModule, contains a DataParallel, or has
            a forward that is a generator or a coroutine.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> with polycast.apply_policy(model, polycast.Policy(modules={"1": "fp32"})), polycast.autocast("cpu"):
        ...     model(torch.ones(1, 4)).dtype
        torch.float32
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    policy = _read_policy(model, policy)
    found: dict[nn.Module, tuple[str, dict[str, Rule]]] = {}
    finder = ModuleFinder(model)
    for device in (ANY_DEVICE, *policy.devices):
        part = policy.for_device(device) if device else policy
        for module, (name, rule) in _rules_by_module(model, part, finder).items():
            found.setdefault(module, (name, {}))[1][device] = rule
    has_replicas = any(isinstance(each, nn.DataParallel) for each in model.modules())
    for module, (name, _) in found.items():
        _check(name, module, has_replicas)
    changes.COMPILED_MODELS.make()
    handle = ModuleRules(policy)
    try:
        for module, (name, rules) in found.items():
            handle._put(name, module, rules)
    except BaseException:  # a module may refuse to have its forward set
        handle.remove()
        raise
    if owner is not None:
        remove_policy(model, owner=owner)
        handle.rule_set.owner = owner
    return handle


def rules_of(model: nn.Module) -> dict[str, str]:
    """Return the rules of a model's modules by module name, as text.

    This includes the rules of a copied or loaded model, for which there is no :class:`ModuleRules`.

    Args:
        model: a model, under rules of :func:`apply_policy` or not.

    Returns:
        For each module with a rule, the one that decides, such as ``"'head' = 'fp32'"``.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> import copy, torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> rules = polycast.apply_policy(model, polycast.Policy(modules={"1": "fp32"}))
        >>> copied = copy.deepcopy(model)
        >>> polycast.rules_of(copied)
        {'1': "1 = 'fp32'"}
        >>> polycast.remove_policy(copied)
        >>> polycast.rules_of(copied), polycast.rules_of(model)
        ({}, {'1': "1 = 'fp32'"})
    """
    forwards = {name: forward.rules for name, forward in _ruled_forwards(model).items()}
    return {name: _as_text(rules) for name, rules in forwards.items() if rules}


def remove_policy(model: nn.Module, *, owner: str | None = None) -> None:
    """Remove all rules from a model's modules, or those of an owner.

    Use it for copied and loaded models; :meth:`ModuleRules.remove` removes the rules of one call of
    :func:`apply_policy`, and does nothing afterwards. Copies of the model keep their rules.

    Args:
        model: a model, under rules or not.
        owner: as for :func:`apply_policy`; None: remove all rules.

    Raises:
        TypeError: `model` is not a module.
    """
    for forward in _ruled_forwards(model).values():
        forward.keep(lambda rule_set: owner not in (None, rule_set.owner))


def _ruled_forwards(model: nn.Module) -> dict[str, RuledForward]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    forwards = {name: RuledForward.of(module) for name, module in model.named_modules()}
    return {name: forward for name, forward in forwards.items() if forward is not None}


def _as_text(rules: Mapping[str, Rule]) -> str:
    """Return a module's rules by device as text."""
    return ", ".join(f"{device}: {rule.text}" if device else rule.text for device, rule in rules.items())


def _read_policy(model: nn.Module, policy: PolicyLike) -> Policy:
    """Return a policy; if a mapping names modules, the error says how to write that."""
    try:
        return Policy.of(policy)
    except ValueError as error:
        names = {name for name, _ in model.named_modules()} if isinstance(policy, Mapping) else set[str]()
        modules = {key: policy[key] for key in policy if key in names} if isinstance(policy, Mapping) else {}
        if not modules:
            raise
        raise ValueError(
            f"policy: {next(iter(modules))!r} is a module, and a mapping names ops. For modules write "
            f"polycast.apply_policy(model, polycast.Policy(modules={modules!r}))"
        ) from error


def _rules_by_module(model: nn.Module, policy: Policy, finder: ModuleFinder) -> dict[nn.Module, tuple[str, Rule]]:
    """Return by module its name and its rule for one device."""
    found: dict[nn.Module, tuple[str, Rule]] = {}
    if policy.ops:
        found[model] = "", Rule("ops", ops=policy.ops)
    for key, written in policy.modules.items():
        for name, module in finder.find(key).items():
            rule = _read(key, written)
            if module is model and policy.ops:
                rule = rule._replace(ops=policy.ops | (rule.ops or OpPolicies()))
            found[module] = found.get(module, (name,))[0], rule
    return {
        module: (name, rule._replace(policies=_text(rule)) if rule.ops is not None or rule.recipe is not None else rule)
        for module, (name, rule) in found.items()
    }


def _text(rule: Rule) -> str:
    items = frozenset() if rule.ops is None else rule.ops.resolved_items
    return make_override(ANY_DEVICE, items, MODULE_RULE, "", rule.recipe, None).text


def _read(key: str, rule: ModuleRule) -> Rule:
    text = f"{key or repr(key)} = {rule!r}"
    if isinstance(rule, Recipe):
        return Rule(text, recipe=rule)
    if isinstance(rule, ModulePolicies):
        if rule.output is None:
            return Rule(text, ops=rule)
        return Rule(text, ops=rule if len(rule) > 1 else None, output=read_dtype(rule.output))
    if rule in (FP32, OFF):
        return Rule(text, enabled=False, cast_inputs=rule == FP32)
    return Rule(text, dtype=read_dtype(rule))


def _check(name: str, module: nn.Module, has_replicas: bool) -> None:
    """Raise TypeError for a module that cannot be under a rule."""
    what = f"the module {name!r}" if name else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{what} is a ScriptModule, whose forward is not Python: it cannot be under a rule. Put the model under "
            "rules before parts of it are scripted, and script no module that has one."
        )
    if has_replicas and any(isinstance(each, nn.DataParallel) for each in module.modules()):
        raise TypeError(
            f"{what} is run by nn.DataParallel, whose replicas would call the original's forward: it cannot be under a "
            "rule. Use DistributedDataParallel."
        )
    if isinstance(inspect.getattr_static(type(module), FORWARD), (staticmethod, classmethod)):
        raise TypeError(f"{what} has a forward that is not a method of its instances: it cannot be under a rule")
    forward = getattr(module, FORWARD)
    if inspect.isgeneratorfunction(forward) or inspect.iscoroutinefunction(forward):
        raise TypeError(f"{what} has a forward that is suspended in the middle: it cannot be under a rule")
