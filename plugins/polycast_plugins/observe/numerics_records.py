"""`NumericsRecord`: the magnitudes of what an op computed or cast, and how much of it underflowed or overflowed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NumericsRecord:
    """Values that an op computed or that were cast for it, in one module, pass and dtype.

    Attributes:
        module: the module that called the op, in the backward pass the one whose gradients it computed; None: none of
            the model's.
        op: the name in the dispatcher.
        role: ``"forward"`` or ``"backward"``.
        dtype: the dtype of the values, of a cast after it.
        count: the number of values.
        amax: the largest magnitude of the finite ones, of a cast before it.
        underflowed: how many became zero or subnormal in `dtype`: of a cast, those that were not so before.
        overflowed: how many became inf or nan: of a cast, those that were finite before; of a result, those of ops
            whose inputs were finite.
        of: ``"weight"`` or ``"activation"``, as for :class:`~polycast_plugins.observe.records.Cast`, or ``"result"`` of
            the op.
        source: the dtype before a cast; empty for results.
        zeroed: how many of `underflowed` became zero.
        nonfinite: how many are inf or nan, whatever they were before.
    """

    module: str | None
    op: str
    role: str
    dtype: str
    count: int = 0
    amax: float = 0.0
    underflowed: int = 0
    overflowed: int = 0
    of: str = "result"
    source: str = ""
    zeroed: int = 0
    nonfinite: int = 0

    @property
    def underflow_share(self) -> float:
        """The share of the values that underflowed, from 0 to 1."""
        return self.underflowed / self.count if self.count else 0.0

    @property
    def overflow_share(self) -> float:
        """The share of the values that overflowed, from 0 to 1."""
        return self.overflowed / self.count if self.count else 0.0
