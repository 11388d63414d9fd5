"""polycast in Accelerate: a function to call before ``prepare``."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn

from polycast import RunLog, WeightCache
from polycast.plugin import Recipe

from .settings import PolicyLike, RegionSettings, run_in_regions


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    policy: PolicyLike | None = None,
    recipe: Recipe | str | None = None,
    cache: WeightCache | None = None,
    log: RunLog | None = None,
) -> Any:
    """Prepare a model so that its forward runs in polycast regions.

    The model's forward opens a region inside the one that ``Accelerator(mixed_precision=...)`` makes, with its dtype.
    Without mixed precision, autocast stays off. ``accelerator.save_state`` saves the policy and the recipe, and
    ``load_state`` restores them if none were given.

    Args:
        accelerator: the accelerator.
        model: the model.
        policy, recipe, cache: as in :class:`polycast.autocast`; the policy may have rules for modules.
        log: a :class:`polycast.RunLog`, for whose steps the program calls ``log.step()``. It observes the model,
            records the history of the accelerator's gradient scaler, and is saved and restored, too.

    Returns:
        The model as ``accelerator.prepare`` returns it.

    Raises:
        OSError, TypeError, ValueError: see :class:`polycast.autocast`.
        TypeError: `log` is not a RunLog.
    """
    if log is not None and not isinstance(log, RunLog):
        raise TypeError(f"log must be a polycast.RunLog or None, got {log!r:.100}")
    settings = RegionSettings(policy, recipe, cache)
    run_in_regions(model, settings)
    restore = partial(settings.restore, model=model)
    accelerator.register_for_checkpointing(SimpleNamespace(state_dict=settings.state_dict, load_state_dict=restore))
    if log is not None:
        log.watch(model, accelerator.scaler)
        accelerator.register_for_checkpointing(log)
    return accelerator.prepare(model)
