"""The records of matmuls in an observation."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MatmulRows:
    """Matmuls whose activations have the same number of rows.

    Attributes:
        op, rows: as in a `Measurement` of a :class:`polycast.DeviceProfile`. If there are many numbers of rows, the
            others are rounded up to powers of two.
        calls, flops: as in a :class:`Matmul`.
        estimates: the seconds of these calls by the profile of the device, by way, such as ``"float32"`` and
            ``"bfloat16"``; empty if the device has no profile.
    """

    op: str
    rows: int
    calls: int = 0
    flops: float = 0.0
    estimates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Matmul:
    """Calls of an op that multiplies matrices.

    Attributes:
        op, phase: the op: mm, addmm, bmm, linear, a convolution, attention, a recurrent layer. If one calls another,
            the outermost is counted. An op that is none of these, such as an einsum outside of autocast, has the
            operations of the ops that it calls.
        module: the module that called it; None: none of the model's.
        device: the device whose autocast it reached; empty: none.
        recipe: the active recipe, ``"int8"``; empty: none.
        declined: why the recipe did not compute it; empty: it did, or there was none.
        dtype: the dtype that it computed in, or with a recipe returned; empty: unknown.
        calls: the number of calls.
        seconds: their time, casts included; 0.0 without ``timing=True``.
        rows: the calls by the number of rows of their activations, as far as known.
        flops: the floating-point operations by the sizes of the tensors, as in ``torch.utils.flop_counter``: two for
            each product of two elements. Masks save none, and the dtype does not matter.
    """

    op: str
    phase: str
    module: str | None
    device: str
    recipe: str = ""
    declined: str = ""
    dtype: str = ""
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    rows: tuple[MatmulRows, ...] = ()
