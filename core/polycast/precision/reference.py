"""``Reference``: the run that ``compare`` compares with."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..policy.recipe import RecipeLike
from ..policy.value import PolicyLike


@dataclass(frozen=True)
class Reference:
    """A run to compare with, which differs in what is given from the run that is compared.

    Attributes:
        model: another model, such as another checkpoint; its modules are matched by their names.
        dtype: another fast dtype.
        policy: another policy; ``{}`` for none.
        recipe: another recipe; ``"none"`` for none.
        enabled: whether it runs in a region; False for float32, outside all regions.
        compiled: whether code of :func:`torch.compile` runs as such, or eagerly.

    Example:
        >>> import torch, polycast
        >>> model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
        >>> float16 = polycast.Reference(dtype=torch.float16)
        >>> comparison = polycast.compare(model, x, dtype=torch.bfloat16, reference=float16)
        >>> comparison.reference
        'a region of float16 on cpu'
    """

    model: torch.nn.Module | None = None
    dtype: torch.dtype | None = None
    policy: PolicyLike | None = None
    recipe: RecipeLike | None = None
    enabled: bool | None = None
    compiled: bool | None = None

    @classmethod
    def of(cls, value: object) -> "Reference":
        """Return a reference: float32 for None, and a module as the model.

        Raises:
            TypeError: it is something else.
        """
        if value is None:
            return cls(enabled=False, compiled=False)
        if isinstance(value, torch.nn.Module):
            return cls(value)
        if isinstance(value, Mapping):
            raise TypeError(
                f"reference must be a polycast.Reference or a model, got a mapping ({type(value).__name__}). Load a "
                "state dict into a copy of the model: other = copy.deepcopy(model); other.load_state_dict(...)"
            )
        if not isinstance(value, cls):
            raise TypeError(
                f"reference must be a polycast.Reference, a model, or None for float32; got {value!r}. For example: "
                "reference=polycast.Reference(dtype=torch.float16)"
            )
        if value.model is not None and not isinstance(value.model, torch.nn.Module):
            raise TypeError(f"the model of a Reference must be a torch.nn.Module, got {type(value.model).__name__}")
        return value

    def over(self, other: "Reference") -> "Reference":
        """Return this reference with what is not given as in another."""
        given: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **given)
