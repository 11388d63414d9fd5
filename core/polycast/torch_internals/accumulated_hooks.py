"""Suspend the hooks of parameters that run after their gradients are accumulated."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_HOOKS = "_post_accumulate_grad_hooks"


@contextmanager
def without_post_accumulate_grad_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Suspend the hooks of :meth:`torch.Tensor.register_post_accumulate_grad_hook` for a block.

    Without the attribute, which torch 2.11 to 2.15 have, they are not suspended.
    """
    suspended = [(hooks, dict(hooks)) for each in parameters if (hooks := getattr(each, _HOOKS, None))]
    try:
        for hooks, _ in suspended:  # setting the attribute to None would not remove them from the parameter
            hooks.clear()
        yield
    finally:
        for hooks, before in suspended:
            hooks.update(before)
