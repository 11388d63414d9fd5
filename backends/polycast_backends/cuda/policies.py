"""The op table of CUDA: torch's list for accelerators, the ops of cuDNN, and one that is on CUDA only."""

import torch

from polycast import CastPolicy
from polycast.plugin import STANDARD_POLICIES, policy_table

# New in torch 2.14.
_IF_TORCH_HAS_IT = ("aten::linalg_matrix_sqrth",) if hasattr(torch.ops.aten, "linalg_matrix_sqrth") else ()

POLICIES = {
    **STANDARD_POLICIES,
    **policy_table(
        {
            CastPolicy.LOWER_PRECISION_FP: ("aten::cudnn_convolution", "aten::cudnn_convolution_transpose"),
            CastPolicy.FP32: _IF_TORCH_HAS_IT,
        }
    ),
}

EXCLUDED_OPS = {"aten::_cudnn_rnn": "its kernel copies the cast weights into the flat buffer that cuDNN reads"}
