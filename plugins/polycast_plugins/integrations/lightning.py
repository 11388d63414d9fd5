"""polycast in Lightning: a precision plugin, and callbacks that observe and record.

Works with ``lightning`` and with ``pytorch_lightning``: with the one that is imported already, or the one installed.
"""

import os
import sys
from typing import TYPE_CHECKING, Any, Literal

import torch

from polycast import RunLog, WeightCache
from polycast.plugin import Recipe

from .settings import PolicyLike, RegionSettings
from .training_steps import StepObserver, StepRecorder

if TYPE_CHECKING or "pytorch_lightning" in sys.modules:
    from pytorch_lightning import Callback
    from pytorch_lightning.plugins.precision import MixedPrecision
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.plugins.precision import MixedPrecision
    except ImportError:
        from pytorch_lightning import Callback
        from pytorch_lightning.plugins.precision import MixedPrecision

_KEY = "polycast"
_STEPS = "polycast_steps"
"""The key of checkpoints for the steps of each LogSteps, in the order of the callbacks."""


class Precision(MixedPrecision):
    """A precision plugin whose regions are polycast's: ``Trainer(plugins=[Precision("bf16-mixed", "cpu")])``.

    Checkpoints contain the policy and the recipe. A run that resumes without either uses those of its checkpoint.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: the device type of the regions.
        policy, recipe, cache: as in :class:`polycast.autocast`; the policy may have rules for modules.
        scaler: a gradient scaler for ``"16-mixed"``, by default ``torch.amp.GradScaler(device)``.

    Raises:
        OSError, TypeError, ValueError: see :class:`polycast.autocast`.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        *,
        policy: PolicyLike | None = None,
        recipe: Recipe | str | None = None,
        cache: WeightCache | None = None,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        super().__init__(precision, device, scaler)
        self.settings = RegionSettings(policy, recipe, cache)
        self._module: torch.nn.Module | None = None

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Apply the policy's module rules."""
        self._module = module
        self.settings.apply_rules(module)
        return super().convert_module(module)

    def autocast_context_manager(self) -> torch.autocast:
        """Return a region."""
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        # As Lightning's, which adds up the gradients of each use of a weight in float32.
        cache_enabled = False if self.settings.cache is None and self.settings.recipe is None else None
        return self.settings.region(self.device, dtype, cache_enabled=cache_enabled)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler, and the policy and the recipe."""
        return {**super().state_dict(), _KEY: self.settings.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scaler, and the policy and the recipe if none were given."""
        scaler = {name: value for name, value in state_dict.items() if name != _KEY}
        if scaler:
            super().load_state_dict(scaler)
        self.settings.restore(state_dict.get(_KEY, {}), self._module)


class Observe(Callback):
    """Observe some training steps with :class:`polycast.observe`, and write a report.

    Args:
        report: the HTML file to write when the last of the steps has ended, or the run; None: none.
        first: the first step to observe, counted from 0, over all calls of ``fit``.
        steps: the number of steps.

    Attributes:
        observation: the :class:`polycast_plugins.observe.Observation`; None before the first step.

    Raises:
        TypeError: `first` or `steps` is not an int.
        ValueError: `first` is negative, or `steps` not positive.
    """

    def __init__(self, report: str | os.PathLike[str] | None = None, *, first: int = 10, steps: int = 10) -> None:
        self._observer = StepObserver(report, first=first, steps=steps)

    @property
    def observation(self) -> Any:
        """Return the observation; None before the first step."""
        return self._observer.observation

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start with the first step."""
        self._observer.begin_step(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop after the last step."""
        self._observer.end_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop when the run is interrupted."""
        self._observer.stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop when the run ends."""
        self._observer.stop()


class LogSteps(Callback):
    """Record each optimizer step in a :class:`polycast.RunLog`: ``LogSteps(polycast.RunLog("run.jsonl"))``.

    It records the loss and the history of the precision plugin's gradient scaler. With gradient accumulation a step has
    several batches. A resumed run continues the file at the step of its checkpoint. The first process records.

    Args:
        log: the log; it observes the LightningModule if it has no other model.
        page: the HTML file of :meth:`polycast.RunHistory.to_html`, written when the run ends, also by an exception.

    Raises:
        TypeError: `log` is not a RunLog.
    """

    def __init__(self, log: RunLog, page: str | os.PathLike[str] | None = None) -> None:
        if log is None:
            raise TypeError("log must be a polycast.RunLog, got None")
        self._recorder, self._log = StepRecorder(log, page), log
        self._steps_before = 0
        self._restored_steps: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue at the step of the checkpoint, if there is one."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        steps, self._restored_steps = self._restored_steps, None
        if steps is None:  # a checkpoint without this callback; Lightning counts the steps of each optimizer
            steps = self._log.state_dict()["steps"] or trainer.global_step
        self._recorder.begin_run(pl_module, scaler, steps, is_first_process=trainer.is_global_zero)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the step of an earlier checkpoint."""
        self._restored_steps = None

    # Not as the state of a callback: Lightning refuses two that it cannot tell apart.

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the number of steps that are recorded."""
        checkpoint.setdefault(_STEPS, []).append(self._log.state_dict()["steps"])

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Continue at the step of a checkpoint."""
        loggers = [each for each in trainer.callbacks if isinstance(each, LogSteps)]
        steps = dict(zip(loggers, checkpoint.get(_STEPS, ()), strict=False))
        self._restored_steps = steps.get(self)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step with its first batch."""
        if not self._recorder.is_in_step:
            self._steps_before = trainer.global_step
        self._recorder.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step with its last batch."""
        self._recorder.add_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        if trainer.global_step > self._steps_before:
            self._recorder.end_step(mean=False)  # Lightning has divided them by the number of batches

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep what was recorded of the step, and write the page."""
        self._recorder.end_run(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write the page."""
        self._recorder.end_run()
