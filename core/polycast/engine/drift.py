"""Where a backend's table and what the running torch does differ."""

from dataclasses import dataclass

from ..plugins.backend import Backend
from ..policy.schemas import find_op
from .installation import torch_ops


@dataclass(frozen=True)
class Drift:
    """Where a backend's table and the running torch's differ: op names, sorted.

    Attributes:
        only_in_torch: torch has a kernel at the device's Autocast key, the table has no policy.
        only_in_table: the table has a policy, torch has none for the op.
        skipped: the table has a policy, this torch has no such op.
    """

    only_in_torch: tuple[str, ...]
    only_in_table: tuple[str, ...]
    skipped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.only_in_torch or self.only_in_table or self.skipped)


def drift_of(backend: Backend) -> Drift:
    """Compare a backend's table with the running torch's."""
    in_torch = torch_ops(backend.device_type)
    in_table = sorted(backend.policies.keys() - in_torch)
    return Drift(
        tuple(sorted(in_torch - backend.policies.keys())),
        tuple(name for name in in_table if find_op(name) is not None),
        tuple(name for name in in_table if find_op(name) is None),
    )
