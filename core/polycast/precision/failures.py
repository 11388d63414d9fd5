"""What a model raises under a policy, told from what is no answer about the policy."""

import torch


def is_of_the_policy(error: Exception) -> bool:
    """Return whether a model may have raised an exception because of the policy that it ran under.

    Running out of memory is no such exception, nor is a timeout, which the user's signal handler may have raised.
    """
    return not isinstance(error, (torch.OutOfMemoryError, MemoryError, TimeoutError))


def short_text(error: BaseException) -> str:
    """Return the first line of an exception's text, or its class where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
