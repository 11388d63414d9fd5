"""Models that are compiled while they are under a rule, and run compiled without it too.

``torch.compile`` of a module decides once how the module is called. Where the class's ``forward`` is torch's own, whose
frames Dynamo skips (nn.Sequential, say), it compiles a function that calls the module; otherwise it leaves the
compiling to the frame of ``forward``. A module under a rule has a forward of polycast's, so torch takes the second way;
once the rule is removed, nothing is compiled. So the decision is made for the forward that the rule has replaced.
"""

import functools
import types
from typing import Any

from ..torch_internals import changes
from ..torch_internals.patcher import Patch, expect, method_of
from .ruled_forward import FORWARD, RuledForward


def decide_as_without_rules() -> None:
    """Have ``torch.compile`` decide as without rules how a module is called, from now on."""
    changes.make(changes.COMPILED_MODELS)


def look_past_rules(patch: Patch) -> None:
    """Have OptimizedModule decide by the forward that a rule has replaced."""
    from torch._dynamo import config, trace_rules
    from torch._dynamo.eval_frame import OptimizedModule

    initialize: Any = method_of(OptimizedModule, "_initialize", "self")
    expect(hasattr(config, "wrap_top_frame"), "there is no setting wrap_top_frame")
    is_skipped: Any = trace_rules.check

    @functools.wraps(initialize)
    def initialize_as_without_rules(self: Any) -> None:
        forward = vars(self._orig_mod).get(FORWARD)
        wrapped = forward.__wrapped__ if isinstance(forward, RuledForward) else None
        if isinstance(wrapped, types.MethodType) and is_skipped(wrapped):
            with config.patch(wrap_top_frame=True):
                initialize(self)
        else:
            initialize(self)

    patch.replace(OptimizedModule, "_initialize", initialize_as_without_rules)
