"""What is not in a region's numbers: some in float32 and, where the region has a recipe, some in the fast dtype."""

from typing import NamedTuple

from .search import Members


class Choice(NamedTuple):
    """One way to divide the candidates up, all in their order; what is in neither computes as the region does.

    Attributes:
        members: what is in float32.
        kept: what the recipe of the region is not for, and so is in the fast dtype.
    """

    members: Members = ()
    kept: Members = ()


PLAIN = Choice()
"""The region without a policy."""
