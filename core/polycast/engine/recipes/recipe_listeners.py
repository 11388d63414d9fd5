"""Listeners for the ops of regions with a recipe: computed by it, or in the fast dtype after all."""

from collections.abc import Callable, Sequence
from typing import Any

from ...common.listeners import Listeners
from ...torch_internals.private_names import tracing_context
from .actions import forget_actions
from .plan import Plan

# No action is kept while there are listeners: the engine then notifies them of each call.
listeners: Listeners[Callable[[str, str, str, str | None], object]] = Listeners(start=forget_actions)
"""They get the device type, the recipe's name, the op's in the dispatcher, and why the recipe fell back, or None."""

calibrators: Listeners[Callable[[Plan, str, Sequence[Any]], object]] = Listeners(start=forget_actions)
"""They get the plan, the op and its arguments. In a thread that has some, ops that the recipe would compute run in
float32."""


def notify(device_type: str, recipe: str, op: str, reason: str | None) -> None:
    """Notify the listeners of an op, unless a compiler traces it: compiled code notifies them when it runs."""
    if not listeners or tracing_context() is not None:
        return
    for listener in listeners:
        listener(device_type, recipe, op, reason)
