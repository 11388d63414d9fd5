"""The settings of regions in a training run: applied to its model, and saved in its checkpoints."""

import os
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from typing_extensions import Self

from polycast import Policy, WeightCache, apply_policy, autocast, remove_policy
from polycast.errors import warn_user
from polycast.plugin import InstanceForward, Recipe, read_recipe, torch_name

PolicyLike: TypeAlias = Policy | Mapping[Any, Any] | str | os.PathLike[str]
_OWNER = "polycast_plugins.integrations"
_is_any_autocast_enabled: Callable[[], bool] = torch_name(
    "torch._C._is_any_autocast_enabled", lambda: True, "models in regions of an integration are slower without autocast"
)


class RegionSettings:
    """The policy, recipe and cache of a run's regions; raises as :class:`polycast.autocast`."""

    def __init__(
        self,
        policy: PolicyLike | None = None,
        recipe: Recipe | str | None = None,
        cache: WeightCache | None = None,
    ) -> None:
        if cache is not None and not isinstance(cache, WeightCache):
            raise TypeError(f"cache must be a polycast.WeightCache or None, got {cache!r}")
        self.recipe: Recipe | None = None if recipe is None else read_recipe(recipe)
        self.cache = cache
        self._set_policy(None if policy is None else Policy.of(policy))
        self._given = {name for name, text in self.state_dict().items() if text}

    def _set_policy(self, policy: Policy | None) -> None:
        self.policy, self._ops = policy, None if policy is None else policy.without_modules()

    def region(
        self, device_type: str, dtype: torch.dtype | None = None, *, cache_enabled: bool | None = None
    ) -> autocast:
        """Return a region with these settings; by default of the dtype of the region around it."""
        return autocast(device_type, dtype, True, cache_enabled, policy=self._ops, recipe=self.recipe, cache=self.cache)

    def apply_rules(self, model: nn.Module) -> None:
        """Apply the policy's module rules to a model, in place of those of an earlier run or another checkpoint."""
        if self.policy is not None and self.policy.has_module_rules:
            apply_policy(model, self.policy.only_modules(), owner=_OWNER)
        else:
            remove_policy(model, owner=_OWNER)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cache, which cannot be pickled."""
        return {**vars(self), "cache": None}

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: copies of a model run with the same settings."""
        return self

    def state_dict(self) -> dict[str, str]:
        """Return the policy and the recipe as text; a cache is not part of a checkpoint."""
        policy = "" if self.policy is None else self.policy.text()
        return {"policy": policy, "recipe": "" if self.recipe is None else self.recipe.text}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Use the policy and the recipe of a checkpoint, or warn if others were given."""
        here = self.state_dict()
        for name, saved in state.items():
            if name in self._given and here[name] != saved:
                warn_user(
                    f"the run was saved with the {name} {saved or None!r}, and goes on with {here[name]!r}. To use the "
                    f"saved one, leave out {name}="
                )
            elif name == "policy":
                self._set_policy(Policy.of_text(saved) if saved else None)
            else:
                self.recipe = Recipe.of_text(saved) if saved else None

    def restore(self, state: Mapping[str, str], model: nn.Module | None) -> None:
        """Load a checkpoint's settings for a model that runs with these, if there is one; see `load_state_dict`."""
        self.load_state_dict(state)
        if model is not None and "policy" not in self._given:
            self.apply_rules(model)


def run_in_regions(model: nn.Module, settings: RegionSettings, dtype: torch.dtype | None = None) -> None:
    """Make the forward of a model open a region inside the enabled one that it is called in, and apply module rules.

    These settings replace those of an earlier run with the model.

    Args:
        model, settings: the model, and the settings of its regions.
        dtype: the dtype of regions around a forward that opens its own. None: open a region inside the enclosing one,
            if autocast is on, with its dtype.
    """
    forward, before = _ForwardInRegion.of(model), dict(vars(model))
    if forward is None:
        _ForwardInRegion(model, settings, dtype).put()
    try:
        settings.apply_rules(model)
    except BaseException:
        vars(model).clear()
        vars(model).update(before)
        raise
    if forward is not None:
        forward.replace_settings(settings, dtype)


class _ForwardInRegion(InstanceForward):
    """The ``forward`` of a model that runs in regions."""

    kept_as = "_polycast_regions"

    def __init__(self, model: nn.Module, settings: RegionSettings, dtype: torch.dtype | None) -> None:
        super().__init__(model)
        self._settings, self._dtype = settings, dtype

    def replace_settings(self, settings: RegionSettings, dtype: torch.dtype | None) -> None:
        """Use other settings; their dtype counts if this forward is around one that opens regions."""
        self._settings = settings
        if self._dtype is not None and dtype is not None:
            self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward in a region."""
        device_type = self._device_type()
        if device_type is None:
            return self.__wrapped__(*args, **kwargs)
        with self._settings.region(device_type, self._dtype):
            return self.__wrapped__(*args, **kwargs)

    def _device_type(self) -> str | None:
        """Return the device of the model's first parameter in memory; without a dtype, the first with autocast on."""
        default = torch.empty(0).device.type
        devices = (each.device.type for each in self.module.parameters() if not each.is_meta)
        if self._dtype is not None:
            return next(devices, default)
        if not _is_any_autocast_enabled():
            return None
        return next((each for each in chain(devices, (default,)) if torch.is_autocast_enabled(each)), None)
