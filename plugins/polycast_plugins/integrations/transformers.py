"""polycast in the Trainer of transformers: a callback."""

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from polycast import RunLog, WeightCache
from polycast.plugin import Recipe

from .settings import PolicyLike, RegionSettings, run_in_regions
from .training_steps import StepObserver, StepRecorder

_PREPARED = "_original_forward"
"""An attribute of models whose forward Accelerate has put into a region."""
_callbacks: "WeakKeyDictionary[nn.Module, PolycastCallback]" = WeakKeyDictionary()
"""The callbacks whose regions models run in."""


class PolycastCallback(TrainerCallback, ExportableState):
    """Run a Trainer's model in polycast regions: ``Trainer(..., callbacks=[PolycastCallback(policy=...)])``.

    The model's forward opens a region inside the one that ``TrainingArguments(bf16=True)`` or ``fp16=True`` makes, with
    its dtype. Without either, autocast stays off. Checkpoints contain the policy and the recipe; the Trainer restores
    them with ``restore_callback_states_from_checkpoint=True``.

    Args:
        policy, recipe, cache: as in :class:`polycast.autocast`; the policy may have rules for modules.
        report: the HTML file of an observation of some steps; None: no step is observed.
        first: the first step to observe, counted from 0, over all calls of ``train``.
        steps: the number of steps to observe.
        log: a :class:`polycast.RunLog`: of each step it records the loss that the model returns for all its batches
            (none with label smoothing, for which the model returns none), and the history of the gradient scaler. A
            resumed run continues the log at the step of its checkpoint. The first process records.
        page: the HTML file of :meth:`polycast.RunHistory.to_html`, written when the run ends. If training raises, the
            Trainer does not call this callback; ``log.history`` has the steps up to then.

    Raises:
        OSError, TypeError, ValueError: see :class:`polycast.autocast`.
    """

    def __init__(
        self,
        *,
        policy: PolicyLike | None = None,
        recipe: Recipe | str | None = None,
        cache: WeightCache | None = None,
        report: str | os.PathLike[str] | None = None,
        first: int = 10,
        steps: int = 10,
        log: RunLog | None = None,
        page: str | os.PathLike[str] | None = None,
    ) -> None:
        self.settings = RegionSettings(policy, recipe, cache)
        self._observer = StepObserver(report, first=first, steps=steps)
        self._recorder = StepRecorder(log, page)
        self._loss_hook: RemovableHandle | None = None
        self._has_shares = False  # whether the losses of a step's batches are divided by the items of all
        self._restored: dict[str, str] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Make the forward of the model open regions."""
        self._use(model, args)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Set up a model or callback that came after on_init_end, and start recording."""
        self._observer.stop()  # a run that has raised has left it open
        self._use(self._model_in(model), args)
        self._stop_recording()
        if self._recorder.log is not None and model is not None:
            scaler, is_first = getattr(optimizer, "scaler", None), state.is_world_process_zero
            self._recorder.begin_run(model, scaler, state.global_step, is_first_process=is_first)
            # A function, which is not copied with the model, as this object would be.
            self._loss_hook = model.register_forward_hook(lambda *call: self._note_loss(*call), with_kwargs=True)

    def _note_loss(self, model: nn.Module, inputs: Any, named_inputs: Mapping[str, Any], output: Any) -> None:
        if model.training:
            self._has_shares = named_inputs.get("num_items_in_batch") is not None
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            self._recorder.add_loss(loss)

    def _stop_recording(self) -> None:
        self._recorder.abandon_step()
        hook, self._loss_hook = self._loss_hook, None
        if hook is not None:
            hook.remove()

    def _model_in(self, model: nn.Module | None) -> nn.Module | None:
        """Return the model that FSDP1 has wrapped since `on_init_end`; another model as it is."""
        if model is None or model in _callbacks:
            return model
        known = (each for each in model.modules() if each in _callbacks)
        return next((each for each in known if self._restored or _callbacks[each] is self), model)

    def _use(self, model: nn.Module | None, args: Any) -> None:
        given = None if model is None else _callbacks.get(model)
        if model is None or given is self:
            return
        _callbacks[model] = self
        if given is not None and self._restored:  # the Trainer has replaced the user's callback by this one
            self._observer, self._recorder, self.settings = given._observer, given._recorder, given.settings
            self.settings.restore(self._restored, model)
            return
        run_in_regions(model, self.settings, _dtype_of(args) if hasattr(model, _PREPARED) else None)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start to observe with the first step, and record each step."""
        if self._observer.report is not None:
            self._observer.begin_step(model)
        self._recorder.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop observing after the last step, and end the record of this one."""
        self._observer.end_step()
        self._recorder.end_step(mean=not self._has_shares)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report of a run that was shorter, and the page."""
        self._observer.stop()
        self._stop_recording()
        self._recorder.end_run()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint saves."""
        return {"args": {}, "attributes": {"saved_settings": self.saved_settings}}

    @property
    def saved_settings(self) -> dict[str, str]:
        """The policy and the recipe as text; the Trainer sets it when it restores the callback."""
        return self.settings.state_dict()

    @saved_settings.setter
    def saved_settings(self, state: dict[str, str]) -> None:
        self._restored = state
        self.settings.load_state_dict(state)


def _dtype_of(args: Any) -> torch.dtype | None:
    """Return the fast dtype of TrainingArguments; None without mixed precision."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
