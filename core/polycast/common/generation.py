"""The generation of this process: how long answers of backends are kept, and what settings of regions resolve to.

A change of what these depend on advances it. The native engine reads `number` each time a region is constructed.
"""

import itertools

_numbers = itertools.count()
number = next(_numbers)
"""Of the current generation. Read it before what is kept for it: another thread may advance it meanwhile."""


def advance() -> None:
    """Begin another generation, in which backends are asked again; to call after a change."""
    global number
    number = next(_numbers)  # a number of its own, also where two threads do this at once
