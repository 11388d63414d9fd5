"""Autocast for Ascend NPUs, with the lists of ops of torch_npu: torch's for accelerators, with some differences."""

from collections.abc import Sequence

import torch

from polycast import CastPolicy
from polycast.plugin import STANDARD_POLICIES, Availability, Backend, hookimpl, policy_table

if torch._C._get_privateuse1_backend_name() == "privateuseone":  # else torch_npu is imported, which names the device
    torch.utils.rename_privateuse1_backend("npu")

ADDED = policy_table({CastPolicy.LOWER_PRECISION_FP: ("cudnn_convolution", "cudnn_convolution_transpose")})
NOT_LISTED = """linalg_vecdot vdot rms_norm _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"""
_LEFT_OUT = {f"aten::{name}" for name in NOT_LISTED.split()}


class NpuBackend(Backend):
    """The NPUs of torch_npu; float16 by default."""

    device_type = "npu"
    default_dtype = torch.float16
    policies = {**{op: policy for op, policy in STANDARD_POLICIES.items() if op not in _LEFT_OUT}, **ADDED}

    def supported_dtypes(self) -> Sequence[torch.dtype]:
        """Return the fast dtypes."""
        return (torch.float16, torch.bfloat16)

    def availability(self) -> Availability:
        """Return whether an NPU is visible; ``torch.npu`` is of torch_npu."""
        if not hasattr(torch, "npu"):
            return Availability(False, "torch.npu is missing: import torch_npu first")
        visible: bool = torch.npu.is_available()
        return Availability(visible, "" if visible else "no NPU device is visible")


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``npu``."""
    return NpuBackend()
