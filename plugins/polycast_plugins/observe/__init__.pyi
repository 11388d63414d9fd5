from polycast.plugin import Plugin

from .conversions import BatchWriter as BatchWriter
from .conversions import ScalarWriter as ScalarWriter
from .facts import Facts as Facts
from .facts import Matmul as Matmul
from .facts import MatmulRows as MatmulRows
from .facts import RecipeCounts as RecipeCounts
from .facts import Run as Run
from .finding import Finding as Finding
from .grad_scaler import RecordingGradScaler as RecordingGradScaler
from .observation import Observation as Observation
from .observer import observe_program as observe_program
from .records import Cast as Cast
from .records import Chain as Chain
from .records import Compiled as Compiled
from .records import Counts as Counts
from .records import Decision as Decision
from .records import LowBit as LowBit
from .records import Module as Module
from .records import NonFinite as NonFinite
from .records import NumericsRecord as NumericsRecord
from .records import Op as Op
from .records import Origin as Origin
from .records import Region as Region
from .remedies import Flow as Flow
from .run_findings import RunFinding as RunFinding
from .step_log import RandomState as RandomState
from .step_log import StepLog as StepLog
from .steps import ScalerHistory as ScalerHistory
from .steps import SkippedStep as SkippedStep
from .steps import StepRecord as StepRecord
from .text import matmul_lines as matmul_lines
from .text import recipe_lines as recipe_lines

plugin: Plugin
