"""Autocast for XLA devices, with the lists of ops of torch_xla."""

import importlib.util
from collections.abc import Sequence

import torch

from polycast import CastPolicy
from polycast.plugin import Availability, Backend, hookimpl, policy_table

LOWER = """conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding bmm mm baddbmm
addmm addbmm linear matmul conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu relu max_pool2d
einsum"""
FP32 = """batch_norm _softmax softmax.int log_softmax.int binary_cross_entropy prod.default prod.dim_int cdist trace
cholesky cholesky_inverse cholesky_solve inverse reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss smooth_l1_loss
cross_entropy_loss l1_loss margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss.IntList
ctc_loss.Tensor kl_div multilabel_margin_loss binary_cross_entropy_with_logits qr svd triangular_solve
multilabel_margin_loss_forward linalg_svd linalg_inv_ex"""
PROMOTE = "stack cat index_copy"


class XlaBackend(Backend):
    """The devices of torch_xla; bfloat16 by default."""

    device_type = "xla"
    default_dtype = torch.bfloat16
    policies = policy_table(
        {
            CastPolicy.LOWER_PRECISION_FP: LOWER.split(),
            CastPolicy.FP32: FP32.split(),
            CastPolicy.PROMOTE: PROMOTE.split(),
        }
    )
    optional_ops = dict.fromkeys(("aten::cholesky", "aten::qr"), "a later torch took it out")

    def supported_dtypes(self) -> Sequence[torch.dtype]:
        """Return the fast dtypes: bfloat16, and float16 for XLA on GPUs."""
        return (torch.bfloat16, torch.float16)

    def availability(self) -> Availability:
        """Return whether torch_xla finds a device; an error of it is the reason."""
        if importlib.util.find_spec("torch_xla") is None:
            return Availability(False, "the package torch_xla is not installed")
        import torch_xla

        return Availability(torch_xla.device() is not None)


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``xla``."""
    return XlaBackend()
