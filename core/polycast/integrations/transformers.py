"""polycast in the Trainer of transformers: a callback."""

import os
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..engine.persistence.weight_cache import WeightCache
from ..policy.recipe import RecipeLike
from ..policy.value import PolicyLike
from .observing import StepObserver
from .settings import RegionSettings, run_in_regions


class PolycastCallback(TrainerCallback, ExportableState):
    """Run a Trainer's model in polycast regions: ``Trainer(..., callbacks=[PolycastCallback(policy=...)])``.

    The model's forward opens a region inside the one that ``TrainingArguments(bf16=True)`` or ``fp16=True`` makes, with
    its dtype. Without either, autocast stays off. Checkpoints contain the policy and the recipe; the Trainer restores
    them with ``restore_callback_states_from_checkpoint=True``.

    Args:
        policy: a :class:`polycast.Policy`, also with rules for modules, or what makes one.
        recipe: as in :class:`polycast.autocast`.
        cache: a :class:`polycast.WeightCache`.
        report: the HTML file of an observation of some steps; None: no step is observed.
        first: the first step to observe, counted from 0.
        steps: the number of steps to observe.

    Raises:
        OSError, TypeError, ValueError: see :class:`polycast.autocast`.
    """

    def __init__(
        self,
        *,
        policy: PolicyLike | None = None,
        recipe: RecipeLike | None = None,
        cache: WeightCache | None = None,
        report: str | os.PathLike[str] | None = None,
        first: int = 10,
        steps: int = 10,
    ) -> None:
        self.settings = RegionSettings(policy, recipe, cache)
        self._observer = StepObserver(report, first=first, steps=steps)
        self._models: list[nn.Module] = []

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Make the forward of the model open regions."""
        self._use(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Do so with a model that was made since, and with a callback that was added since."""
        self._use(model)

    def _use(self, model: nn.Module | None) -> None:
        if model is not None and not any(each is model for each in self._models):
            self._models.append(model)
            run_in_regions(model, self.settings)
            self.settings.apply_rules(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start to observe with the first step."""
        if self._observer.report is not None:
            self._observer.step_begins(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after the last step."""
        self._observer.step_ends()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report of a run that was shorter."""
        self._observer.stop()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint saves: how to make the callback, and its policy and recipe."""
        report = None if self._observer.report is None else str(self._observer.report)
        arguments = {"report": report, "first": self._observer.first, "steps": self._observer.steps}
        return {"args": arguments, "attributes": {"saved_settings": self.saved_settings}}

    @property
    def saved_settings(self) -> dict[str, str]:
        """The policy and the recipe as text; the Trainer sets it when it restores the callback."""
        return self.settings.state_dict()

    @saved_settings.setter
    def saved_settings(self, state: dict[str, str]) -> None:
        self.settings.load_state_dict(state)
