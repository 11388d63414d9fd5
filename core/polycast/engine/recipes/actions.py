"""`Action`: a decision of Python about one call, which the native engine reuses for calls with the same metadata."""

from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import torch

from ...common.events import events
from ...torch_internals.dispatcher import OpOverload
from .. import state

Results: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...]
"""The results of an op: a tensor, or a tuple of tensors, with None for each undefined one."""


class ActionKind(IntEnum):
    """The kinds of actions."""

    DECLINED = 0
    """Compute the op in the fast dtype, as without the recipe."""
    FLOAT32 = 1
    """Cast tensors to float32, compute the op, and cast its results to the fast dtype. Autograd may record it."""
    OPERATOR = 2
    """Call an operator with the op's arguments, the prepacked weight or the weight's cast, the fast dtype and the
    constants. Autograd may record it. Ask Python if the weight is not prepacked."""


class Action(NamedTuple):
    """How to compute calls of an op in regions with a recipe.

    `perform` in plan.py returns it with the result of a call. The native engine keeps it for calls with the same
    metadata, until :meth:`.StateMachine.forget_actions`, so it must depend on nothing but

    - the op, the plan and the fast dtype;
    - of each tensor: dtype, sizes, strides, device, and whether it is a weight or a view of all or a part of one;
    - the other arguments;
    - which tensors autograd records, and whether an autograd.Function runs, or a backward;
    - whether the region has a WeightCache, whether autocast caches casts, and whether torch may use fused attention;
    - torch's number of threads, by which the profile is chosen;
    - the policies that are registered: a change of them forgets all actions.

    Attributes:
        kind: what to do.
        weight: for OPERATOR, the position of the weight among the op's arguments.
        prepack_id: for OPERATOR, the id of the prepacked weight; CACHED_CAST: the operator takes the weight's cast;
            AS_IT_IS: the weight itself.
        operator: for OPERATOR, the operator.
        constants: for OPERATOR, its last arguments.
    """

    kind: ActionKind
    weight: int = 0
    prepack_id: int = 0
    operator: OpOverload | None = None
    constants: tuple[Any, ...] = ()


CACHED_CAST, AS_IT_IS = 0, -1
"""Values of `prepack_id` for a weight's cast and for the weight itself. Ids of prepacked weights are positive."""


# No action is kept while an event has listeners: the engine then notifies them of each call.
events.recipe_call.start = events.calibration.start = lambda: state.machine.forget_actions()
