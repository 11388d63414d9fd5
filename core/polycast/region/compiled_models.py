"""Keep models compiled that get compiled under a module rule, after the rule is removed.

``torch.compile`` decides once how to call a module. If the class's ``forward`` is torch's own (nn.Sequential), whose
frames Dynamo skips, it compiles a function that calls the module; otherwise it relies on the frame of ``forward``. A
module under a rule has a forward of polycast's, so torch does the latter, and nothing is compiled once the rule is
removed. This makes the decision for the forward that the rule has replaced.
"""

import functools
import types
from typing import Any

from ..torch_internals.patcher import Patch, expect, method_of
from .instance_forward import FORWARD
from .ruled_forward import RuledForward


def look_past_rules(patch: Patch) -> None:
    """Make OptimizedModule decide by the forward that a rule has replaced."""
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
