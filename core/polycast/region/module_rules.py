"""Rules for modules: in an enabled region, a module under a rule computes as the rule says.

A rule has to be in force while the module's ``forward`` runs, wherever that is called from. So the module gets a
``forward`` of its own: a callable object, which holds the module. An object, unlike a bound method, is copied and
pickled with the module, rule and all; the class of the module, its names, hooks and state_dict are what they were.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from ..engine import state
from ..engine.casting import cast_nested
from ..engine.state import Overlay
from ..policy.modules import FP32, OFF, ModuleRule, modules_of
from ..policy.names import read_dtype
from ..policy.ops import Ops
from ..policy.value import Policy, PolicyLike
from . import switched_off
from .autocast import autocast
from .checkpoint import carry_regions
from .entry import fast_path
from .policies import overlay_of_rule

_FORWARD = "forward"
_REPLICATE = "_replicate_for_data_parallel"
_ANY_DEVICE = ""
_excluded_keys = torch._C._dispatch_tls_local_exclude_set


class Rule(NamedTuple):
    """What the region for a module is to be; `text` is for people."""

    text: str
    enabled: bool = True
    dtype: torch.dtype | None = None
    cast_inputs: bool = False
    ops: Ops | None = None
    policies: str = ""
    """Those of `ops` as the text of an overlay, which compiled code is made from and guarded by."""


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
        self._mark = _Mark()
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
        forward = _rules_of(module)
        if forward is None:
            forward = RuledForward(module, vars(module).get(_FORWARD))
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

    The keys of ``policy.modules`` are globs over the names in ``model.named_modules()``: ``*`` is any part of a name
    between dots, ``**`` any number of such, or none: ``"**"`` alone is every module and the model itself, which ``""``
    alone is. ``"class:torch.nn.LayerNorm"`` means the modules of a class and its subclasses. Of several rules that
    match, the last decides. A container without a forward (nn.ModuleList) passes its rule on to what it contains. A
    module with several names has one rule: the last that matches any of them. The values:

    - ``"fp32"``: autocast is off in the module, and its floating-point inputs are cast to float32 (not float64 ones);
    - ``"off"``: autocast is off in it, and inputs are as they are;
    - a fast dtype, such as ``"float16"``: its ops run in a region with that dtype, also inside a module that a rule
      has switched autocast off in;
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
    for device in (_ANY_DEVICE, *policy.devices):
        part = policy.for_device(device) if device else policy
        for module, (name, rule) in _rules_by_module(model, part).items():
            found.setdefault(module, (name, {}))[1][device] = rule
    for module, (name, _) in found.items():
        _check(name, module)
    handle = ModuleRules(policy)
    try:
        for module, (name, rules) in found.items():
            handle._put(name, module, rules)
    except BaseException:  # of a module that lets nobody set its forward
        handle.remove()
        raise
    return handle


def _rules_by_module(model: nn.Module, policy: Policy) -> dict[nn.Module, tuple[str, Rule]]:
    """Return by module its name and the rule that decides on one device."""
    found: dict[nn.Module, tuple[str, Rule]] = {}
    if policy.ops:
        found[model] = "", Rule("ops", ops=policy.ops)
    for key, written in policy.modules.items():
        for name, module in modules_of(model, key).items():
            rule = _read(key, written)
            if module is model and policy.ops:
                rule = rule._replace(ops=policy.ops | (rule.ops or Ops()))
            found[module] = found.get(module, (name,))[0], rule
    return {
        module: (name, rule if rule.ops is None else rule._replace(policies=Overlay(rule.ops.resolved).text))
        for module, (name, rule) in found.items()
    }


def _read(key: str, rule: ModuleRule) -> Rule:
    text = f"{key} = {rule!r}"
    if isinstance(rule, Ops):
        return Rule(text, ops=rule)
    if rule in (FP32, OFF):
        return Rule(text, enabled=False, cast_inputs=rule == FP32)
    return Rule(text, dtype=read_dtype(rule))


def _check(name: str, module: nn.Module) -> None:
    what = f"the module {name!r}" if name else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{what} is a ScriptModule, whose forward is not Python: it cannot be under a rule. Put the model under "
            "rules before parts of it are scripted, and script no module that has one."
        )
    if any(isinstance(each, nn.DataParallel) for each in module.modules()):
        raise TypeError(
            f"{what} is run by nn.DataParallel, whose replicas would call the original's forward: it cannot be under a "
            "rule. Use DistributedDataParallel."
        )
    if isinstance(inspect.getattr_static(type(module), _FORWARD), (staticmethod, classmethod)):
        raise TypeError(f"{what} has a forward that is no method of its instances: it cannot be under a rule")
    forward = getattr(module, _FORWARD)
    if inspect.isgeneratorfunction(forward) or inspect.iscoroutinefunction(forward):
        raise TypeError(f"{what} has a forward that is suspended in the middle: it cannot be under a rule")


def _rules_of(module: nn.Module) -> "RuledForward | None":
    """Return what has the rules that a module is under, also where somebody has wrapped it since."""
    forward = vars(module).get(_FORWARD)
    while forward is not None:
        if isinstance(forward, RuledForward):
            return forward if forward.module is module else None
        forward = getattr(forward, "__wrapped__", None)
    return None


_InForce = tuple[tuple[str, Rule], ...]
"""The rules that decide on a call, each with the device whose region it is about."""


class _Mark:
    """What the rules of one call of apply_policy have in common; a copied model has another."""


class RuledForward:
    """The ``forward`` of a module that is under rules.

    Attributes:
        module: the module.
        inner: what was the instance's own forward before; None where it had none, and its class's is called.
    """

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None) -> None:
        self.module = module
        self.inner = inner
        self._devices = _known_devices()
        self._entries: list[tuple[_Mark, Mapping[str, Rule]]] = []
        self._rules: Mapping[str, Rule] = {}
        self._usual: dict[int, _InForce] = {}
        self._regions: dict[tuple[str, torch.dtype, int], autocast] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again where a copy needs it, and what this process's torch knows."""
        return {**vars(self), "_usual": {}, "_regions": {}, "_devices": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _devices=_known_devices())

    def put(self) -> None:
        """Be the forward of the module."""
        self.module.forward = self
        vars(self.module).setdefault(_REPLICATE, _refuse_replicas)

    def add(self, mark: _Mark, rules: Mapping[str, Rule]) -> None:
        """Put the module under rules, the last of which decide."""
        self._entries.append((mark, rules))
        self._decide()

    def drop(self, mark: _Mark) -> None:
        """Take rules back. With the last of them the module has the forward that it had before."""
        self._entries = [entry for entry in self._entries if entry[0] is not mark]
        self._decide()
        attributes = vars(self.module)
        if self._entries or attributes.get(_FORWARD) is not self:  # another's is over it, and calls it
            return
        if self.inner is None:
            del attributes[_FORWARD]
        else:
            attributes[_FORWARD] = self.inner
        if attributes.get(_REPLICATE) is _refuse_replicas:
            del attributes[_REPLICATE]

    def _decide(self) -> None:
        self._rules = self._entries[-1][1] if self._entries else {}
        self._usual = {}
        self._regions = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward as the rules say."""
        if is_dynamo_compiling() or switched_off.anywhere():
            return self._run(self._in_force(), args, kwargs)
        # Which devices autocast is enabled for: those whose Autocast key this thread does not exclude.
        excluded = _excluded_keys().raw_repr()
        rules = self._usual.get(excluded)
        if rules is None:
            rules = self._usual[excluded] = self._in_force()
        return self._run(rules, args, kwargs)

    def _in_force(self) -> "_InForce":
        enabled = tuple([device for device in self._devices if torch.is_autocast_enabled(device)])
        devices = enabled
        if switched_off.anywhere():
            devices = tuple([each for each in self._devices if each in enabled or switched_off.by_rule(each)])
        found = []
        for device in devices:
            rule = self._rules.get(device) or self._rules.get(_ANY_DEVICE)
            # Policies for ops are for a region, and switch none on.
            if rule is not None and (rule.dtype is not None or not rule.enabled or device in enabled):
                found.append((device, rule))
        return tuple(found)

    def _run(self, rules: "_InForce", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not rules:
            if self.inner is None:
                return type(self.module).forward(self.module, *args, **kwargs)
            return self.inner(*args, **kwargs)
        device, rule = rules[0]
        if rule.cast_inputs:
            args = tuple([cast_nested(value, device, torch.float32) for value in args])
            if kwargs:
                kwargs = {name: cast_nested(value, device, torch.float32) for name, value in kwargs.items()}
        with self._region(device, rule):
            if rule.enabled:
                return self._run(rules[1:], args, kwargs)
            if not is_dynamo_compiling():
                carry_regions()  # into checkpoints: that it is a rule that has switched autocast off is not torch's
            before = switched_off.enter(device)
            try:
                return self._run(rules[1:], args, kwargs)
            finally:
                switched_off.leave(before)

    def _region(self, device: str, rule: Rule) -> autocast:
        if is_dynamo_compiling():
            from ..compilers.dynamo import region_of_rule, rule_decides

            if rule.ops is None:
                rule_decides(device)
                return autocast(device, rule.dtype, rule.enabled)
            in_graph: autocast = region_of_rule(autocast, device, rule.dtype, rule.enabled, rule.policies, rule.text)
            return in_graph
        dtype = rule.dtype or state.machine.dtype(device)
        known = 0 if rule.ops is None else len(rule.ops.resolved)  # a library may bring an op that was optional
        region = self._regions.get((device, dtype, known))
        if region is None:
            region = autocast(device, dtype, rule.enabled) if rule.ops is None else _ModuleRegion(device, dtype, rule)
            self._regions[device, dtype, known] = region
        return region

    # What others ask of a forward.

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that is called; ``inspect.signature`` is its."""
        return self.inner if self.inner is not None else type(self.module).forward.__get__(self.module)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of the module and the arguments."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return forward

    @property
    def __name__(self) -> str:
        return _FORWARD

    @property
    def __globals__(self) -> NoReturn:
        # TorchScript asks for this before it compiles a function, and nobody else insists on it.
        raise AttributeError(
            "a module under the rules of polycast.apply_policy cannot be scripted: TorchScript would leave them out. "
            "Remove the rules before, or use torch.compile."
        )


class _ModuleRegion(autocast):
    """The region that a rule with policies for ops opens."""

    def __init__(self, device: str, dtype: torch.dtype, rule: Rule) -> None:
        super().__init__(device, dtype, rule.enabled)
        assert rule.ops is not None
        overlay = overlay_of_rule(rule.ops, rule.text)
        if overlay is not None:
            self._settings = self._settings._replace(overlay=overlay)
            self._fast_path = fast_path(self._settings)


def _known_devices() -> tuple[str, ...]:
    """Return the devices of this process's torch: another may know more, or fewer."""
    return tuple(torch._C._autocast_supported_devices())


def _refuse_replicas() -> NoReturn:
    raise RuntimeError(
        "a model under the rules of polycast.apply_policy cannot be replicated by nn.DataParallel: replicas would call "
        "the original's forward. Use DistributedDataParallel, or remove the rules before."
    )
