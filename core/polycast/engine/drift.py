"""Differences between a backend's table and the running torch's."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..policy.schemas import find_op, has_named_dimensions
from ..registry.backend import Backend
from .installation import torch_ops

_NAMED_TENSORS = "for named tensors, which torch took out in 2.13"


@dataclass(frozen=True)
class Drift:
    """Differences between a backend's table and the running torch's, as sorted op names.

    Attributes:
        only_in_torch: torch has a kernel at the device's Autocast key, the table has no policy.
        only_in_table: the table has a policy, torch has none for the op.
        skipped: the table has a policy, this torch has no such op.
        excluded_ops: ops that only torch has a kernel for on purpose, and why. They do not count as drift.
    """

    only_in_torch: tuple[str, ...]
    only_in_table: tuple[str, ...]
    skipped: tuple[str, ...]
    excluded_ops: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.only_in_torch or self.only_in_table or self.skipped)


def drift_of(backend: Backend) -> Drift:
    """Compare a backend's table with the running torch's."""
    in_torch = torch_ops(backend.device_type)
    only_in_torch = sorted(in_torch - backend.policies.keys())
    only_in_table = sorted(backend.policies.keys() - in_torch - backend.added_ops.keys())
    of_names = (name for name in only_in_torch if (op := find_op(name)) is not None and has_named_dimensions(op))
    left = {**dict.fromkeys(of_names, _NAMED_TENSORS), **backend.excluded_ops}
    return Drift(
        tuple(name for name in only_in_torch if name not in left),
        tuple(name for name in only_in_table if find_op(name) is not None),
        tuple(name for name in only_in_table if find_op(name) is None),
        {name: left[name] for name in only_in_torch if name in left},
    )
