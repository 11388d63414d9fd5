"""The forward of a module under rules: a callable object that runs the module in the regions of its rules."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..common import generation
from ..engine import state
from ..engine.override import MODULE_RULE
from ..policy.op_policies import OpPolicies
from ..policy.recipe import Recipe
from ..registry.registry import registry
from ..torch_internals import changes
from ..torch_internals.dispatcher import autocast_supported_devices
from ..torch_internals.patcher import Patch, expect, method_of
from . import switched_off
from .autocast import autocast
from .cast_arguments import CastArguments
from .cast_result import CastResult
from .instance_forward import FORWARD, InstanceForward
from .resolve import override_of_ops, usable_recipe

ANY_DEVICE = ""


class Rule(NamedTuple):
    """The region of a module; `text` is the rule as it was written."""

    text: str
    enabled: bool = True
    dtype: torch.dtype | None = None
    cast_inputs: bool = False
    ops: OpPolicies | None = None
    policies: str = ""
    """The policies of `ops` and the recipe, as the text of an override, for compiled code."""
    recipe: Recipe | None = None
    output: torch.dtype | None = None
    """The dtype of what the module returns."""


_CACHES = "_devices", "_rules_by_excluded_keys", "_regions"
_ActiveRules = tuple[tuple[str, Rule], ...]
"""The rules that apply to a call, each with its device."""


class RuleSet:
    """Identifies the rules that one call of apply_policy adds. In a copied model they have another one."""

    owner: str | None = None
    """Name of who applies them: they replace those of the same owner. None: nobody in particular."""
    is_suspended = False
    """Whether they are inactive."""


class RuledForward(InstanceForward):
    """The ``forward`` of a module that is under rules.

    Attributes:
        rules: by device, the rules that decide: those added last.
    """

    kept_as = "_polycast_rules"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._devices = tuple(autocast_supported_devices())
        self._entries: list[tuple[RuleSet, Mapping[str, Rule]]] = []
        self.rules: Mapping[str, Rule] = {}
        self._rules_by_excluded_keys: dict[int, _ActiveRules] = {}
        self._regions: dict[tuple[str, torch.dtype, int, int], _ModuleRegion] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out caches, and the devices that this process's torch knows."""
        return {name: value for name, value in super().__getstate__().items() if name not in _CACHES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        caches = {"_devices": tuple(autocast_supported_devices()), "_rules_by_excluded_keys": {}, "_regions": {}}
        super().__setstate__({**state, **caches})

    def add(self, rule_set: RuleSet, rules: Mapping[str, Rule]) -> None:
        """Put the module under rules; those added last decide."""
        self._entries.append((rule_set, rules))
        self.update()

    def keep(self, is_kept: Callable[[RuleSet], bool]) -> None:
        """Remove the other rules. Without any left, restore the module's forward."""
        self._entries = [entry for entry in self._entries if is_kept(entry[0])]
        self.update()
        if not self._entries:
            self.take_out()

    def update(self) -> None:
        """Let the rules decide that are not suspended, also for a call that has begun before its forward."""
        active = [rules for rule_set, rules in self._entries if not rule_set.is_suspended]
        self.rules = active[-1] if active else {}
        self._rules_by_excluded_keys = {}
        self._regions = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward under the rules."""
        if is_dynamo_compiling() or switched_off.on_any_device():
            return self._run(self._active_rules(), args, kwargs)
        excluded = state.machine.excluded_keys()
        known = self._rules_by_excluded_keys  # another one, if the rules change meanwhile
        rules = known.get(excluded)
        if rules is None:
            rules = known[excluded] = self._active_rules()
        return self._run(rules, args, kwargs)

    def _active_rules(self) -> "_ActiveRules":
        enabled = tuple([device for device in self._devices if torch.is_autocast_enabled(device)])
        devices = enabled
        if switched_off.on_any_device():
            devices = tuple([each for each in self._devices if each in enabled or switched_off.is_off(each)])
        found = []
        for device in devices:
            rule = self.rules.get(device) or self.rules.get(ANY_DEVICE)
            if rule is None:
                continue
            if rule.dtype or rule.recipe or not rule.enabled or device in enabled:
                found.append((device, rule))
            elif rule.output:  # policies for ops do not enable autocast
                found.append((device, Rule(rule.text, output=rule.output)))
        return tuple(found)

    def _run(self, rules: "_ActiveRules", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not rules:
            if self.inner is None:
                return type(self.module).forward(self.module, *args, **kwargs)
            return self.inner(*args, **kwargs)
        device, rule = rules[0]
        if rule.output is not None:
            return CastResult(device, rule.output).of(self._run_in_region(rules, args, kwargs))
        if not rule.cast_inputs:
            return self._run_in_region(rules, args, kwargs)
        casts = CastArguments(device, torch.float32)
        try:
            args = tuple([casts.of(value) for value in args])
            if kwargs:
                kwargs = {name: casts.of(value) for name, value in kwargs.items()}
            return self._run_in_region(rules, args, kwargs)
        finally:
            casts.give_back(self.module, rule.text)

    def _run_in_region(self, rules: "_ActiveRules", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward in the region of the first rule, and under the others."""
        device, rule = rules[0]
        if rule.output is not None and rule.ops is None:
            return self._run(rules[1:], args, kwargs)
        with self._region(device, rule):
            if rule.enabled:
                return self._run(rules[1:], args, kwargs)
            if not is_dynamo_compiling():
                changes.CHECKPOINT.make()  # torch does not know that a rule has switched autocast off
            before = switched_off.enter(device)
            try:
                if len(rules) == 1 and self.inner is None:  # as usual
                    return type(self.module).forward(self.module, *args, **kwargs)
                return self._run(rules[1:], args, kwargs)
            finally:
                switched_off.leave(before)

    def _region(self, device: str, rule: Rule) -> autocast:
        if is_dynamo_compiling():
            from ..compilers.dynamo import note_rule, region_of_rule

            if not rule.policies:
                note_rule(device)
                return autocast(device, rule.dtype, rule.enabled)
            in_graph: autocast = region_of_rule(autocast, device, rule.dtype, rule.enabled, rule.policies, rule.text)
            return in_graph
        dtype = rule.dtype or state.machine.dtype(device)
        known = 0 if rule.ops is None else len(rule.ops.resolved)  # a library may define an optional op
        threads = 0 if rule.recipe is None else torch.get_num_threads()  # each number has its profile
        key = device, dtype, known, threads
        region = self._regions.get(key)
        # Another thread may have changed the rules meanwhile.
        if region is None or region.rule is not rule or region.generation != generation.number:
            region = self._regions[key] = _ModuleRegion(device, dtype, rule)
        return region

    @property
    def __globals__(self) -> NoReturn:
        # TorchScript reads this before it compiles a function; nothing else requires it.
        raise AttributeError(
            "a module under the rules of polycast.apply_policy cannot be scripted: TorchScript would leave them out. "
            "Remove the rules before, or use torch.compile."
        )


class _ModuleRegion(autocast):
    """The region that a rule opens.

    Attributes:
        generation: the number of the generation in which it was made.
        rule: the rule.
        module_rule: its text; observers read it.
    """

    def __init__(self, device: str, dtype: torch.dtype, rule: Rule) -> None:
        self.generation = generation.number
        super().__init__(device, dtype, rule.enabled)
        self.rule = rule
        self.module_rule = rule.text
        recipe = None if rule.recipe is None else usable_recipe(rule.recipe, registry.find(device), rule.enabled)
        override = override_of_ops(device, rule.ops or OpPolicies(), MODULE_RULE, rule.text, recipe)
        if override is not None:
            self._settings = self._settings._replace(override=override)


def look_past_rules(patch: Patch) -> None:
    """Keep models compiled that get compiled under a rule, after the rule is removed.

    ``torch.compile`` decides once how to call a module. If the class's ``forward`` is torch's own (nn.Sequential),
    whose frames Dynamo skips, it compiles a function that calls the module; otherwise it relies on the frame of
    ``forward``. A module under a rule has a forward of polycast's, so torch does the latter, and nothing is compiled
    once the rule is removed. This makes OptimizedModule decide by the forward that the rule has replaced.
    """
    from torch._dynamo import config, trace_rules
    from torch._dynamo.eval_frame import OptimizedModule

    initialize: Any = method_of(OptimizedModule, "_initialize", "self")
    expect(hasattr(config, "wrap_top_frame"), "there is no setting wrap_top_frame")
    is_skipped: Any = trace_rules.check

    @functools.wraps(initialize)
    def initialize_as_without_rules(self: Any) -> None:
        forward = vars(self._orig_mod).get(FORWARD)
        wrapped = forward.__wrapped__ if isinstance(forward, RuledForward) else None
        if isinstance(wrapped, types.MethodType) and is_skipped(wrapped):
            with config.patch(wrap_top_frame=True):
                initialize(self)
        else:
            initialize(self)

    patch.replace(OptimizedModule, "_initialize", initialize_as_without_rules)
