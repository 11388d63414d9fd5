"""polycast in Weights & Biases: a writer for ``log_to`` and ``RunLog(writer=...)``."""

import importlib
from collections.abc import Mapping
from typing import Any

from polycast_plugins.observe import BatchWriter

_STEP = "polycast/step"


class WandbWriter(BatchWriter):
    """Write scalars to a run of wandb, over a step of their own: wandb's counts calls of ``log``.

    Args:
        run: the run; None: the one that ``wandb.init`` has started.

    Raises:
        RuntimeError: there is no run.
    """

    def __init__(self, run: Any = None) -> None:
        self._run = importlib.import_module("wandb").run if run is None else run
        if self._run is None:
            raise RuntimeError("wandb has no run: call wandb.init() first, or pass the run")
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("polycast/*", step_metric=_STEP)

    def add_scalars_of_step(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars of a step."""
        self._run.log({**scalars, _STEP: step})
