"""polycast in MLflow: a writer for ``log_to`` and ``RunLog(writer=...)``."""

import importlib
from collections.abc import Mapping
from typing import Any

from polycast_plugins.observe import BatchWriter


class MlflowWriter(BatchWriter):
    """Write scalars to a run of MLflow as metrics.

    Args:
        run_id: the run; None: the active one, which ``mlflow.start_run`` has started.

    Raises:
        RuntimeError: there is no run.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        active = self._mlflow.active_run() if run_id is None else None
        if run_id is None and active is None:
            raise RuntimeError("MLflow has no active run: call mlflow.start_run() first, or pass run_id")
        self._run_id = run_id if active is None else active.info.run_id

    def add_scalars_of_step(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars of a step."""
        self._mlflow.log_metrics(dict(scalars), step=step, run_id=self._run_id)
