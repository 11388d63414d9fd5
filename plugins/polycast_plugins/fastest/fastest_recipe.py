"""The recipe `Fastest`, and its profile."""

from collections.abc import Sequence
from typing import Any

from polycast.plugin import Recipe

from .device_profile import DeviceProfile
from .profile import find, profile

_OPS = (
    *("_addmm_activation", "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "addmm", "baddbmm", "bmm"),
    *("conv1d", "conv2d", "conv3d", "gelu", "linear", "matmul", "mish", "mkldnn_rnn_layer", "mm"),
    *("scaled_dot_product_attention", "sigmoid", "silu", "tanh"),
)
"""The default of `ops`, sorted."""
POINTWISE_OPS = frozenset(f"aten::{name}" for name in ("gelu", "mish", "sigmoid", "silu", "tanh"))
"""Elementwise ops without a policy that kernels of backends compute, with the same results."""
COMPOSED_OPS = {
    "aten::_transformer_encoder_layer_fwd": (
        *("aten::_native_multi_head_attention", "aten::_addmm_activation", "aten::addmm", "aten::layer_norm"),
        *("aten::native_layer_norm", "aten::add_.Tensor"),
    )
}
"""Ops without a policy that are computed as a whole. By op, the ops that it calls."""


class Fastest(Recipe):
    """Compute each op the fastest way that is at least as accurate as the fast dtype.

    The ops are matmuls, convolutions, attention, and recurrent and encoder layers.

    A profile (:func:`polycast.profile`) says how long each takes. The ways are

    - torch's kernel for the fast dtype, with the weight's cached cast, as without a recipe;
    - the backend's own kernel for the fast dtype, with the same cast, or with the float32 weight as it is;
    - float32: the weight as it is, neither cast nor cached, and the activations converted.

    The backend's kernels, if it has any, compute elementwise ops of one tensor, such as `gelu`, with torch's results.

    Outputs have the fast dtype. In training, forward and backward are chosen separately, and activations are saved in
    the fast dtype. The choice depends on the op, on the sizes of its arguments up to a factor of two, on their dtypes,
    on whether autograd records it, and on whether the region has a `WeightCache` that will have the weight's cast.

    Args:
        profile: a :class:`DeviceProfile`, or the path of a saved one, so that choices are the same on every machine;
            a changed file is read after :func:`polycast.plugin.refresh`. None: the profile of this machine, which the
            first region measures if there is none.
        ops: the ops to compute the fastest way, by names as in a :class:`Policy`; of these, those with the policy
            LOWER_PRECISION_FP, and encoder layers and elementwise ops without a policy.
        min_size: the smallest number of elements of a weight, or of the second matrix, for which to choose. It does not
            apply to elementwise ops.

    Raises:
        TypeError: `profile` is neither; `ops` are not names; or `min_size` is not an int.
        ValueError: torch has no such op; or `min_size` is negative.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(1024, 1024)
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Fastest()):  # doctest: +SKIP
        ...     model(torch.randn(1, 1024)).dtype
        torch.bfloat16
    """

    kind = "fastest"
    needs_kernels = False
    avoids_slow_dtypes = ""
    plan_class = "polycast_plugins.fastest.fastest_plan:FastestPlan"
    without_policy = POINTWISE_OPS | COMPOSED_OPS.keys()
    profile: Any = None
    ops: Sequence[str] = _OPS
    min_size: int = 0

    def check(self) -> None:
        """See :class:`polycast.plugin.Recipe`."""
        profile = self.profile
        if (
            profile is not None
            and not isinstance(profile, str)
            and not isinstance(getattr(profile, "digest", None), str)
        ):
            raise TypeError(f"profile must be a DeviceProfile, the path of a saved one, or None, got {profile!r}")

    def resolved(self, device_type: str, measure: bool) -> "Fastest":
        """Return a recipe whose profile is that of this machine, or in a file, with the profile itself.

        Regions with the result compute in the same ways, and compiled code for one serves the others, whichever process
        and machine they are on.

        A device without a profile is measured if `measure`; if not, the recipe is returned as it is.

        Raises:
            ValueError: the profile is of another device type; or its file cannot be read, or is not a profile.
            Exception: the device cannot be measured.
        """
        if self.profile is None:
            found = profile(device_type) if measure else find(device_type)
        elif isinstance(self.profile, str):
            found = DeviceProfile.load(self.profile)
        else:
            found = self.profile
        if not isinstance(found, DeviceProfile):
            return self
        if found.device_type != device_type:
            raise ValueError(f"{self!r} has a profile of {found.device_type}, and the region is for {device_type}")
        return self if found is self.profile else self.with_options(profile=found)
