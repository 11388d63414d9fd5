"""The op table of npy: that of torch's accelerators, with changes for NumPy."""

from polycast import CastPolicy
from polycast.plugin import STANDARD_POLICIES, policy_table

_OWN = policy_table(
    {
        # NumPy has no erf, so that gelu is computed in float64 anyway: its result need not lose digits here.
        CastPolicy.FP32: ("aten::gelu",),
        # torch.cat takes tensors of float16 and float32 together, and so does NumPy; one dtype is one copy less.
        CastPolicy.PROMOTE: ("aten::cat", "aten::stack"),
    }
)

POLICIES = {**STANDARD_POLICIES, **_OWN}
