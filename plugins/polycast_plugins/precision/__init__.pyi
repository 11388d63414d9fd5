from polycast.plugin import Plugin

from .comparison import Comparison as Comparison
from .comparison import GradientErrors as GradientErrors
from .comparison import ModuleErrors as ModuleErrors
from .evidence import Evidence as Evidence
from .evidence import Holdout as Holdout
from .evidence import Tuned as Tuned
from .measured import Outcome as Outcome
from .minimal_set import Choice as Choice
from .minimal_set import Trial as Trial
from .model_explanation import ModelExplanation as ModelExplanation
from .model_explanation import ModuleExplanation as ModuleExplanation
from .timing import Timings as Timings
from .values import Error as Error

plugin: Plugin
