"""Observe which ops run in which dtype and why, at what cost, and what to do about it.

``polycast`` has what users call: ``observe``, ``RunLog``, ``RunHistory``, ``grad_scaler``. This package has the types
of the results.
"""

from typing import TYPE_CHECKING

from polycast.plugin import Plugin, lazy_names

if TYPE_CHECKING:
    from .conversions import BatchWriter as BatchWriter
    from .conversions import ScalarWriter as ScalarWriter
    from .facts import Facts as Facts
    from .facts import Run as Run
    from .grad_scaler import RecordingGradScaler as RecordingGradScaler
    from .observation import Observation as Observation
    from .observer import observe_program as observe_program
    from .recipe_counts import Matmul as Matmul
    from .recipe_counts import MatmulRows as MatmulRows
    from .recipe_counts import RecipeCounts as RecipeCounts
    from .recipe_counts import matmul_lines as matmul_lines
    from .records import Cast as Cast
    from .records import Chain as Chain
    from .records import Compiled as Compiled
    from .records import Counts as Counts
    from .records import Decision as Decision
    from .records import Finding as Finding
    from .records import LowBit as LowBit
    from .records import Module as Module
    from .records import NonFinite as NonFinite
    from .records import NumericsRecord as NumericsRecord
    from .records import Op as Op
    from .records import Region as Region
    from .remedies import Flow as Flow
    from .run_findings import RunFinding as RunFinding
    from .step_log import RandomState as RandomState
    from .step_log import StepLog as StepLog
    from .step_records import Origin as Origin
    from .step_records import ScalerHistory as ScalerHistory
    from .step_records import SkippedStep as SkippedStep
    from .step_records import StepRecord as StepRecord
    from .text import recipe_lines as recipe_lines
    from .trace import TorchProfile as TorchProfile

plugin = Plugin(
    names={
        "RunHistory": "polycast_plugins.observe.run_history:RunHistory",
        "RunLog": "polycast_plugins.observe.run_log:RunLog",
        "grad_scaler": "polycast_plugins.observe.grad_scaler:grad_scaler",
        "observe": "polycast_plugins.observe.observer:observe",
    },
    libraries=["polycast_plugins.observe.observer_library:OBSERVER"],
)

_PLACES = {
    "BatchWriter": "conversions",
    "Cast": "records",
    "Chain": "records",
    "Compiled": "records",
    "Counts": "records",
    "Decision": "records",
    "Facts": "facts",
    "Finding": "records",
    "Flow": "remedies",
    "LowBit": "records",
    "Matmul": "recipe_counts",
    "matmul_lines": "recipe_counts",
    "MatmulRows": "recipe_counts",
    "Module": "records",
    "NonFinite": "records",
    "NumericsRecord": "records",
    "Observation": "observation",
    "observe_program": "observer",
    "Op": "records",
    "Origin": "step_records",
    "recipe_lines": "text",
    "RandomState": "step_log",
    "RecipeCounts": "recipe_counts",
    "RecordingGradScaler": "grad_scaler",
    "Region": "records",
    "Run": "facts",
    "RunFinding": "run_findings",
    "ScalarWriter": "conversions",
    "ScalerHistory": "step_records",
    "SkippedStep": "step_records",
    "StepLog": "step_log",
    "StepRecord": "step_records",
    "TorchProfile": "trace",
}
"""The module of each type. Names are imported when they are first used."""

__all__ = [*_PLACES, "plugin"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted(__all__)
