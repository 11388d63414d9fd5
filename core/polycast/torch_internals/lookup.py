"""Look up the private names of torch that polycast reads, with a fallback for each.

``dispatcher.py``, ``private_names.py`` and ``callers_state.py`` have the names. Other modules of the core use private
names only in functions that make a change to torch (they take a `Patch`), or are listed, with a reason, in
tests/test_private_names.py. With its fallbacks a plain region computes correctly. Where a fallback cannot tell whether
a cast may be cached, it answers no.
"""

import importlib
import sys
from typing import Any, TypeVar

import torch

from ..errors import warn_user

_T = TypeVar("_T")

losses: dict[str, str] = {}
"""By private name, what users lose without it."""
missing: dict[str, str] = {}
"""The part of `losses` whose names this torch lacks."""
_warned = False
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def find(name: str) -> Any:
    """Return the object with a dotted name in torch, importing its module.

    Raises:
        ImportError, AttributeError: this torch lacks the module or the name.
    """
    where, _, attribute = name.rpartition(".")
    try:
        owner = sys.modules[where]
    except KeyError:
        try:
            owner = importlib.import_module(where)
        except ModuleNotFoundError:
            owner = find(where)  # a class, or a module of C++ that cannot be imported
    return getattr(owner, attribute)


def torch_name(name: str, fallback: _T, loss: str, since: tuple[int, int] = (0, 0)) -> _T:
    """Return the object with a private name, or the fallback.

    A name is not counted as missing in a torch older than `since`.
    """
    losses[name] = loss if losses.get(name, loss) == loss else f"{losses[name]}; {loss}"
    try:
        found: _T = find(name)
    except (AttributeError, ImportError):
        if since <= _VERSION:
            missing[name] = losses[name]
        return fallback
    return found


def warn_of_missing() -> None:
    """Warn once per process about missing names and what is lost without them."""
    global _warned
    if missing and not _warned:
        _warned = True
        lost = "; ".join(f"without {name}: {loss}" for name, loss in missing.items())
        warn_user(
            f"This torch ({torch.__version__}) lacks internals that polycast reads ({lost}). Regions work. Use a torch "
            "that polycast supports, or a polycast that supports this torch."
        )
