"""Rules for modules: in an enabled region, a module under a rule computes as the rule says.

A rule has to be in force while the module's ``forward`` runs, wherever that is called from. So the module gets a
``forward`` of its own: a callable object, which holds the module. An object, unlike a bound method, is copied and
pickled with the module, rule and all; the class of the module, its names, hooks and state_dict are what they were.
"""

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from typing_extensions import Self

from ..engine.override import MODULE_RULE, make_override
from ..policy.modules import FP32, OFF, ModuleFinder, ModuleRule
from ..policy.names import read_dtype
from ..policy.op_policies import OpPolicies
from ..policy.recipe import Recipe
from ..policy.value import Policy, PolicyLike
from . import compiled_models
from .ruled_forward import ANY_DEVICE, FORWARD, Mark, Rule, RuledForward, rules_of


class ModuleRules:
    """Rules that are in force in a model until they are removed; what :func:`apply_policy` returns.

    It is a context manager, too, which removes them as it is left.

    Attributes:
        policy: the policy that the rules are of.
        rules: by name of a module, the rule that it is under, as text.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rules: dict[str, str] = {}
        self._mark = Mark()
        self._forwards: list[RuledForward] = []

    def remove(self) -> None:
        """Take the rules back; what copies of the model have is theirs."""
        while self._forwards:
            self._forwards.pop().drop(self._mark)
        self.rules = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<rules of polycast.apply_policy for {len(self.rules)} modules>"

    def _put(self, name: str, module: nn.Module, rules: Mapping[str, Rule]) -> None:
        forward = rules_of(module)
        if forward is None:
            forward = RuledForward(module, vars(module).get(FORWARD))
            forward.put()
        forward.add(self._mark, rules)
        self._forwards.append(forward)
        self.rules[name] = ", ".join(
            f"{device}: {rule.text}" if device else rule.text for device, rule in rules.items()
        )


def apply_policy(model: nn.Module, policy: PolicyLike) -> ModuleRules:
    """Put a model under the rules of a policy, until they are removed.

    In an enabled region, whoever opened it, a module computes as its rule says, and so do the modules inside it that
    have no rule of their own. Outside of any the model is what it was. Rules are in force where ``forward`` runs: not
    in hooks, and not in a module whose ``forward`` is never called (such as the projection in nn.MultiheadAttention,
    whose weight another function uses).

    The keys of ``policy.modules`` are globs over the names in ``model.named_modules()``: ``*`` stands for any
    characters of a part between dots, ``**`` for any number of parts, or none: ``"**"`` alone is every module and the
    model itself, which ``""`` alone is. ``[0-11]`` is a number in a range, ``{q,k}`` either of two, ``[ab]`` a
    character, and a special character in brackets stands for itself, as in ``[*]``. ``"class:torch.nn.LayerNorm"``
    means the modules of a class and its subclasses. Of several rules that match, the last decides. A container without
    a forward (nn.ModuleList) passes its rule on to what it contains. A module with several names has one rule: the
    last that matches any of them. The values:

    - ``"fp32"``: autocast is off in the module, and its floating-point inputs are cast to float32 (not float64 ones);
      what the module writes to them is written back, or refused with a RuntimeError where that is impossible;
    - ``"off"``: autocast is off in it, and inputs are as they are;
    - a fast dtype, such as ``"float16"``: its ops run in a region with that dtype, also inside a module that a rule
      has switched autocast off in;
    - a recipe, such as ``"int8"``, or ``"none"`` for the fast dtype: in place of the recipe of the region outside, also
      inside a module that a rule has switched autocast off in;
    - policies by op: they are laid over what holds outside, and over what regions inside the module ask for.

    ``policy.ops`` hold in the whole model. Where a model is put under rules twice, the later ones decide in the
    modules that both match, until they are removed.

    Args:
        model: the model. It is changed in one way: a module under a rule has a ``forward`` of its own in its
            ``__dict__``, which is copied and pickled with it. ``copy.copy`` of a module calls the original's.
        policy: a :class:`Policy`, a mapping of ops, or the path of a policy file.

    Returns:
        The rules, with ``remove()``; a context manager that removes them.

    Raises:
        ValueError: a key matches no module, with the nearest names; or `policy` is refused by :class:`Policy`.
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
    policy = Policy.of(policy)
    found: dict[nn.Module, tuple[str, dict[str, Rule]]] = {}
    finder = ModuleFinder(model)
    for device in (ANY_DEVICE, *policy.devices):
        part = policy.for_device(device) if device else policy
        for module, (name, rule) in _rules_by_module(model, part, finder).items():
            found.setdefault(module, (name, {}))[1][device] = rule
    has_replicas = any(isinstance(each, nn.DataParallel) for each in model.modules())
    for module, (name, _) in found.items():
        _check(name, module, has_replicas)
    compiled_models.decide_as_without_rules()
    handle = ModuleRules(policy)
    try:
        for module, (name, rules) in found.items():
            handle._put(name, module, rules)
    except BaseException:  # of a module that lets nobody set its forward
        handle.remove()
        raise
    return handle


def _rules_by_module(model: nn.Module, policy: Policy, finder: ModuleFinder) -> dict[nn.Module, tuple[str, Rule]]:
    """Return by module its name and the rule that decides on one device."""
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
    if isinstance(rule, OpPolicies):
        return Rule(text, ops=rule)
    if rule in (FP32, OFF):
        return Rule(text, enabled=False, cast_inputs=rule == FP32)
    return Rule(text, dtype=read_dtype(rule))


def _check(name: str, module: nn.Module, has_replicas: bool) -> None:
    """Refuse a module that cannot be under a rule; only a model that has replicas is searched for them."""
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
        raise TypeError(f"{what} has a forward that is no method of its instances: it cannot be under a rule")
    forward = getattr(module, FORWARD)
    if inspect.isgeneratorfunction(forward) or inspect.iscoroutinefunction(forward):
        raise TypeError(f"{what} has a forward that is suspended in the middle: it cannot be under a rule")
