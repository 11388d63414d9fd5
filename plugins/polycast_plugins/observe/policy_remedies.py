"""Remedies that give an op a policy."""

import functools

from polycast import Policy

from .remedies import name_of

FLOAT32_RANGE = ("bfloat16", "float32", "float64", "complex64", "complex128")
"""The dtypes with at least the range of float32."""


def nonfinite_remedy(op: str, dtype: str, phase: str) -> str:
    """Return what to do about an op that turns finite inputs into inf or nan."""
    if dtype in FLOAT32_RANGE:
        also = ", which has the range of float32" if dtype == "bfloat16" else ""
        return (
            f"It was computed in {dtype}{also}: a wider dtype does not help. Check its inputs, such as a zero in "
            "a divisor or a logarithm, and avoid them with clamp() or an epsilon."
        )
    name = name_of(op)
    keep = f"Keep the op in float32, with {policy_text(name, 'fp32')}, use" if may_have(name, "fp32") else "Use"
    in_forward = f"{keep} bfloat16."
    in_backward = "Scale the loss (polycast.grad_scaler), or use bfloat16."
    return f"{dtype} has less range than float32. {in_backward if phase == 'backward' else in_forward}"


@functools.cache
def may_have(name: str, policy: str) -> bool:
    """Return whether an op may have a policy."""
    try:
        Policy({name: policy})
    except ValueError:  # it writes to its inputs, or this torch lacks the op
        return False
    return True


def policy_text(name: str, policy: str) -> str:
    """Return a policy for an op, as a program writes it."""
    return f'policy={{"{name}": "{policy}"}}'
