"""Autocast for Gaudi, which torch calls hpu: the lists of ops that Intel publishes for it, and its bridge's rules."""

from collections.abc import Sequence

import torch

from polycast import CastPolicy
from polycast.plugin import Availability, Backend, hookimpl, policy_table

LOWER = """addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
dot dropout feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm mul mv softmax
log_softmax scaled_dot_product_attention"""
LOWER_FIRST = "layer_norm group_norm instance_norm batch_norm"  # of LOWER, those whose weights stay float32
FP32 = """acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist cosh
cosine_embedding_loss cosine_similarity cross_entropy_loss dist div divide embedding embedding_bag erfinv exp expm1
hinge_embedding_loss huber_loss kl_div l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
multi_margin_loss multilabel_margin_loss nll_loss pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss
soft_margin_loss softplus tan topk triplet_margin_loss truediv true_divide"""
PROMOTE = "add addcmul addcdiv cat div exp mul pow sub iadd truediv stack"
OPERATOR = "Python's name of the operator, which calls {} of aten"


class HpuBackend(Backend):
    """Gaudi; bfloat16 by default."""

    device_type = "hpu"
    default_dtype = torch.bfloat16
    # In the order in which the lists give way to each other, the last being the strongest.
    policies = {
        **policy_table({CastPolicy.PROMOTE: [*PROMOTE.split(), "add_"]}),
        **policy_table({CastPolicy.FP32: FP32.split()}),
        **policy_table({CastPolicy.LOWER_PRECISION_FP: LOWER.split()}),
        **policy_table({CastPolicy.LOWER_FIRST: LOWER_FIRST.split()}),
    }
    optional_ops = {"aten::iadd": OPERATOR.format("add_"), "aten::truediv": OPERATOR.format("div")}
    caches_casts = False

    def supported_dtypes(self) -> Sequence[torch.dtype]:
        """Return the fast dtypes of Gaudi 2 and newer."""
        return (torch.bfloat16, torch.float16)

    def availability(self) -> Availability:
        """Return whether a Gaudi is visible; ``torch.hpu`` is of habana_frameworks."""
        if not hasattr(torch, "hpu"):
            return Availability(False, "torch.hpu is missing: import habana_frameworks.torch first")
        visible: bool = torch.hpu.is_available()
        return Availability(visible, "" if visible else "no HPU device is visible")


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``hpu``."""
    return HpuBackend()
