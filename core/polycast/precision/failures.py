"""Exceptions of a model under a policy."""

import torch


def may_come_from_policy(error: Exception) -> bool:
    """Return whether a policy may have caused an exception.

    False for running out of memory, and for timeouts, which the user's signal handler may have raised.
    """
    return not isinstance(error, (torch.OutOfMemoryError, MemoryError, TimeoutError))


def short_text(error: BaseException) -> str:
    """Return the first line of an exception's text, or the name of its class if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
