"""The two sides of a comparison: each is a model, in a region or outside, under rules, compiled or not."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from ..policy.dtypes import dtype_name
from ..policy.recipe import Recipe
from ..policy.value import Policy
from ..region.autocast import autocast
from ..region.module_rules import ModuleRules, apply_policy
from .hooks import COMPILED_CALL, run_eagerly, set_stance
from .isolation import ModelState
from .parameter_gradients import ParameterGradients
from .profiling_run import ModelProfile

_COMPILED = "_orig_mod"
"""The attribute of a compiled model that is the model."""


class Side:
    """A run of a model.

    Attributes:
        model: the model.
        region: the region; a disabled one for a run outside all regions.
        is_enabled: whether the region is enabled.
        policy: the rules for modules.
        recipe: the recipe of the region.
        compiled: whether compiled code runs as such.
        gradients: the gradients of the parameters of the model and the loss.
        names: the names of the modules whose calls are watched, by module.
        by_name: these modules, by name.
        profile: the profile of the run.
    """

    profile: ModelProfile

    def __init__(
        self,
        model: torch.nn.Module,
        region: autocast,
        is_enabled: bool,
        policy: Policy,
        recipe: Recipe | None = None,
        compiled: bool = False,
        loss: object = None,
    ) -> None:
        self.model, self.region, self.is_enabled, self.policy = model, region, is_enabled, policy
        self.recipe, self.compiled = recipe, compiled
        self.names: Mapping[torch.nn.Module, str] = {}
        self.by_name: Mapping[str, torch.nn.Module] = {}
        self.gradients = ParameterGradients(model, loss)

    @property
    def state(self) -> ModelState:
        """The state that the forward writes."""
        return self.profile.state

    def text(self) -> str:
        """Return the run as text."""
        recipe = "" if self.recipe is None else f" and {self.recipe.short}"
        fast = f"a region of {dtype_name(self.region.fast_dtype)}{recipe} on {self.region.device}"
        return (fast if self.is_enabled else "float32") + (", compiled" if self.compiled else "")


class Sides:
    """Both sides, of which one is active: its rules for modules apply, and its code is compiled or not.

    Args:
        reference: the run to compare with.
        tested: the run that is compared.
        others: modules besides those of the models whose calls are watched, by name.
    """

    def __init__(self, reference: Side, tested: Side, others: Mapping[str, torch.nn.Module]) -> None:
        self.reference, self.tested = reference, tested
        self.have_one_model = reference.model is tested.model
        is_compiled = reference.compiled or tested.compiled
        found = [
            dict(_visible(side.model, is_compiled))
            if is_compiled or not self.have_one_model
            else {module: name for name, module in side.model.named_modules()}
            for side in (reference, tested)
        ]
        common = set(found[0].values()) & set(found[1].values())
        for side, names in zip((reference, tested), found, strict=True):
            watched = {module: name for module, name in names.items() if name in common or not is_compiled}
            side.names = {**watched, **{module: name for name, module in others.items()}}
            side.by_name = {name: module for module, name in side.names.items()}
        self._rules_differ = (
            self.have_one_model and reference.is_enabled and tested.is_enabled and reference.policy != tested.policy
        )
        self._stances_differ = reference.compiled != tested.compiled
        self._rules: dict[Side, ModuleRules] = {}
        self.active = tested

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the models under their rules for a block, which begins with the reference as the active side."""
        with ExitStack() as stack:
            if self.have_one_model and not self._rules_differ:
                policy = (self.tested if self.tested.is_enabled else self.reference).policy
                stack.enter_context(apply_policy(self.tested.model, policy))
            else:
                for side in (self.reference, self.tested):
                    self._rules[side] = stack.enter_context(apply_policy(side.model, side.policy))
                    if self._rules_differ and side is self.reference:
                        self._rules[side].suspend()
            if self._stances_differ or not self.tested.compiled:
                stack.enter_context(run_eagerly())
            self.active = self.tested
            self.activate(self.reference)
            yield

    def activate(self, side: Side) -> None:
        """Make a side the active one."""
        if side is self.active:
            return
        if self._rules_differ:
            self._rules[self.active].suspend()
            self._rules[side].resume()
        if self._stances_differ:
            set_stance("default" if side.compiled else "force_eager")
        self.active = side

    @contextmanager
    def activated(self, side: Side) -> Iterator[None]:
        """Make a side the active one for a block."""
        before = self.active
        self.activate(side)
        try:
            yield
        finally:
            self.activate(before)


def _visible(model: torch.nn.Module, is_compiled: bool) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield modules whose calls can be matched with those of another model, or of compiled code, with their names.

    A compiled model counts as the model in it, and has its name. In compiled code no calls of modules are visible.
    """
    inside = set[torch.nn.Module]()
    for name, module in model.named_modules():
        inner = getattr(module, _COMPILED, None)
        if isinstance(inner, torch.nn.Module):
            inside.update(inner.modules() if is_compiled else [inner])
        elif is_compiled and getattr(module, COMPILED_CALL, None) is not None:
            inside.update(each for each in module.modules() if each is not module)
        if module not in inside:
            yield module, ".".join(part for part in name.split(".") if part != _COMPILED)
