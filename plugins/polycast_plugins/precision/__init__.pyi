from polycast.plugin import Plugin

from .evidence import Evidence as Evidence
from .evidence import Holdout as Holdout
from .evidence import Tuned as Tuned
from .measured import Outcome as Outcome
from .minimal_set import Choice as Choice
from .minimal_set import Trial as Trial
from .results import Comparison as Comparison
from .results import GradientErrors as GradientErrors
from .results import ModelExplanation as ModelExplanation
from .results import ModuleErrors as ModuleErrors
from .results import ModuleExplanation as ModuleExplanation
from .timing import Timings as Timings
from .values import Error as Error

plugin: Plugin
