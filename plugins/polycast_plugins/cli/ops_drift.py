"""``polycast ops --drift``: where a device's table of ops and the running torch's autocast kernels differ."""

from collections.abc import Mapping
from typing import Any

import torch

from polycast import CastPolicy
from polycast.errors import missing_library
from polycast.plugin import Backend, drift_of

from .terminal import console, print_json, print_line, print_table, table


def show_drift(backend: Backend, as_json: bool) -> None:
    """Print the ops that only one of the two has, and those whose policies differ."""
    found = _drift(backend)
    if as_json:
        print_json(found)
        return
    out, differences = console(), found["differences"]
    if differences:
        rows = table(*differences[0])
        for each in differences:
            rows.add_row(*(cell or "-" for cell in each.values()))
        print_table(out, rows)
        out.print()
    what = f"{len(differences)} differences" if differences else "no drift"
    count, of = found["compared_policies"], f"the table and torch {found['torch']}"
    lines = [f"{what} between {of}; the policies of {count} ops were compared."] if found["torch_autocasts"] else []
    lines += [f"{op} differs from torch on purpose: {reason}" for op, reason in found["on_purpose"].items()]
    for line in [*lines, *found["problems"]]:
        print_line(out, f"{found['device_type']}: {line}")


def _drift(backend: Backend) -> dict[str, Any]:
    name, own, excluded, drift = backend.device_type, backend.policies, backend.excluded_ops, drift_of(backend)
    common = own.keys() - backend.added_ops.keys() - {*drift.only_in_table, *drift.skipped}
    has_kernels = bool(common or drift.only_in_torch or drift.excluded_ops)
    nothing = f"torch {torch.__version__} has no autocast kernels for {name}: there is nothing to compare with."
    policies, problem = _policies_of_torch(name) if has_kernels else ({}, nothing)
    unknown = sorted(common - policies.keys())
    if unknown and not problem:
        problem = f"policies were not compared for ops that cannot be called here: {', '.join(unknown)}."
    others = sorted(op for op in common & policies.keys() if policies[op] is not own[op])
    differences = {
        "torch's own kernel runs": drift.only_in_torch,
        "torch does not autocast it": drift.only_in_table if has_kernels else (),
        "the table's policy is used": [op for op in others if op not in excluded],
        "skipped: this torch lacks the op": drift.skipped,
    }
    return {
        "device_type": name,
        "torch": torch.__version__,
        "torch_autocasts": has_kernels,
        "compared_policies": len(common) - len(unknown),
        "problems": [problem] if problem else [],
        "differences": [
            {"op": op, "table": _name(own, op), "torch": _name(policies, op), "difference": what}
            for what, ops in differences.items()
            for op in ops
        ],
        "on_purpose": {**drift.excluded_ops, **{op: excluded[op] for op in others if op in excluded}},
    }


def _policies_of_torch(device_type: str) -> tuple[Mapping[str, CastPolicy | None], str]:
    """Return the policies of torch's kernels by op, and why they are not known."""
    try:
        from polycast_plugins.testing import policies_of_torch  # which needs pytest

        return policies_of_torch(device_type), ""
    except (ModuleNotFoundError, RuntimeError) as error:
        reason = missing_library(error) if isinstance(error, ModuleNotFoundError) else ""
        return {}, f"policies were not compared. {reason or error}"


def _name(policies: Mapping[str, CastPolicy | None], op: str) -> str | None:
    """Return the name of an op's policy; None if there is none, or it is not known."""
    policy = policies.get(op)
    return policy.value if policy else "none of the policies" if op in policies else None
