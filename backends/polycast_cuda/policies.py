"""The op table of CUDA: torch's list for accelerators and the ops of cuDNN.

torch treats ``aten::_cudnn_rnn`` too, in builds that have cuDNN, with a kernel that flattens the cast weights into one
buffer. It is left to that kernel.
"""

from polycast import STANDARD_POLICIES, CastPolicy, policy_table

POLICIES = {
    **STANDARD_POLICIES,
    **policy_table({CastPolicy.LOWER_PRECISION_FP: ("aten::cudnn_convolution", "aten::cudnn_convolution_transpose")}),
}
