"""Recipes that compute with weights in a few bits: `Int8`, `Int4`, `Float8`, and their base `LowBitRecipe`."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from typing_extensions import override

from polycast.plugin import Feature, Recipe

MATMULS = ("addmm", "linear", "matmul", "mm")
_UNFUSED = "polycast_plugins.quantize.unfused"
FEATURES = (
    Feature(
        "fused attention",
        "In eval mode nn.MultiheadAttention and nn.TransformerEncoder take their fused path, without recipes.",
        (("torch.backends.mha", ("torch.backends.mha.get_fastpath_enabled",), f"{_UNFUSED}:disable_fused_attention"),),
        on_undo=f"{_UNFUSED}:forget_rules_of_dynamo",
    ),
    Feature(
        "fused LSTM",
        "nn.LSTM is computed by oneDNN on the CPU, without recipes.",
        (("torch._VF", ("torch._VF.lstm",), f"{_UNFUSED}:compute_lstm_by_step"),),
    ),
    Feature(
        "experts",
        "torch.nn.functional.grouped_mm is computed in the dtype of its inputs, without recipes.",
        (("torch.nn.functional", ("torch.nn.functional.grouped_mm",), f"{_UNFUSED}:compute_experts_one_by_one"),),
    ),
)
"""The changes to torch for recipes that name them. They outlast regions, and change nothing for other recipes."""


class LowBitRecipe(Recipe):
    """A recipe that computes with weights in a few bits, which kernels prepack once. Subclass it to define one.

    The class has a `kind`, and declares its settings, as for any :class:`polycast.plugin.Recipe`.
    """

    plan_class = "polycast_plugins.quantize.kernel_plan:KernelPlan"
    features = FEATURES

    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return how far the recipe may round activations and a weight. The conformance suite tests kernels by it.

        Args:
            x: float64 [M, K]; each row may have a scale of its own.
            weight: float64 [N, K], a row for each output feature.

        Returns:
            The largest error of each element of `x`, and of `weight`. None, the default: the values that kernels
            compute are not tested.
        """
        return None


class _CalibratedRecipe(LowBitRecipe):
    """A recipe with the setting ``calibration``."""

    loaders = MappingProxyType({"calibration": "polycast_plugins.quantize.calibration:Calibration.load"})

    @override
    def check(self) -> None:
        value = self.known("calibration")
        if value is not None and not hasattr(value, "prepack_arguments"):
            remedy = ". polycast.Calibration.load reads a file" if isinstance(value, str) else ""
            raise TypeError(
                f"calibration must be a Calibration, as polycast.calibrate returns it, or None, got {value!r}{remedy}"
            )


class Int8(_CalibratedRecipe):
    """Matmuls of 8-bit integers, for inference.

    Weights are prepacked once, with a scale for each output feature; activations are quantized at each call. Ops that
    autograd records run in the fast dtype.

    Args:
        scales: ``"row"``: a scale for each row of the activations; ``"tensor"``: one for all.
        ops: the ops to compute, by names as in a :class:`Policy`.
        min_size: the smallest number of elements of a weight.
        calibration: a calibration of the model's weights, or None.

    Raises:
        TypeError, ValueError: see :class:`polycast.plugin.Recipe`.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(1024, 1024)
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8()):  # doctest: +SKIP
        ...     model(torch.randn(1, 1024)).dtype
        torch.bfloat16
    """

    kind = "int8"
    avoids_slow_dtypes = " (inference only)"
    scales: Literal["row", "tensor"] = "row"
    ops: Sequence[str] = MATMULS
    min_size: int = 2**16
    calibration: Any = None

    @override
    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _int8_errors(x, by_row=self.scales == "row"), _int8_errors(weight, by_row=True)


class Int4(_CalibratedRecipe):
    """Matmuls of weights in 4 bits and activations in 8 bits, for inference.

    A weight takes a little more than half a byte for each element, and one row is multiplied at the speed at which the
    weight is read. Rounding to 16 levels changes results more than :class:`Int8` does: measure the model, and calibrate
    it. Ops that autograd records run in the fast dtype.

    Args:
        group_size: the number of successive input features that share a step between levels: 32, 64 or 128. A
            larger one takes less memory, and is less accurate.
        ops: the ops to compute, by names as in a :class:`Policy`.
        min_size: the smallest number of elements of a weight.
        calibration: a calibration of the model's weights, or None.

    Raises:
        TypeError, ValueError: see :class:`polycast.plugin.Recipe`.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(1024, 1024)
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int4()):  # doctest: +SKIP
        ...     model(torch.randn(1, 1024)).dtype
        torch.bfloat16
    """

    kind = "int4"
    group_size: Literal[32, 64, 128] = 32
    ops: Sequence[str] = MATMULS
    min_size: int = 2**16
    calibration: Any = None

    @override
    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % self.group_size))
        groups = _largest(padded.reshape(-1, self.group_size), by_row=True).reshape(padded.shape)
        return _int8_errors(x, by_row=True), groups[:, : weight.shape[1]] / 16  # half the step between 16 levels


class Float8(LowBitRecipe):
    """Matmuls of 8-bit floats (e4m3), for inference. Experimental.

    Args:
        scales: ``"row"``: a scale for each row of the activations and each output feature; ``"tensor"``: one for the
            activations, and one for the weight.
        ops, min_size: as for :class:`Int8`.

    Raises:
        TypeError, ValueError: see :class:`polycast.plugin.Recipe`.
    """

    kind = "float8"
    scales: Literal["row", "tensor"] = "row"
    ops: Sequence[str] = MATMULS
    min_size: int = 2**22

    @override
    def rounding_errors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by_row = self.scales == "row"
        return _float8_errors(x, by_row), _float8_errors(weight, by_row)


def _largest(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return the largest magnitude of each row, or of all, in the shape of the values."""
    magnitudes = values.abs()
    if not by_row:
        magnitudes = magnitudes.flatten()[None]
    # Scales, and their inverses, are normal numbers.
    return magnitudes.amax(1, keepdim=True).clamp(min=2.0**-110).expand(magnitudes.shape).reshape(values.shape)


def _int8_errors(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return half the step between 255 levels, plus a thousandth for the rounding of scales."""
    return _largest(values, by_row) / 127 / 2 * 1.001


def _float8_errors(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return half the value of the last of 4 bits; at least half of 2**-9, the smallest step, if the largest is 448.

    A hundredth is added for the rounding of scales and sums.
    """
    return torch.maximum(values.abs() / 16, _largest(values, by_row) / 448 / 2**10) * 1.01
