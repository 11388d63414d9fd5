"""`Plan`: computes the ops of a recipe on a device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ...common import generation
from ...common.events import events
from ...policy.recipe_base import Recipe
from ...registry.backend import Backend, LowBitKernel
from ...torch_internals.private_names import has_python_key, tracing_context
from ..casts.cast_cache import CastCache
from .actions import Action, Results

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Performed: TypeAlias = tuple[Results | None, Action | None]
"""The results, or None if the op falls back; and the action for like calls, or None if Python decides each time."""


class Computed(NamedTuple):
    """Describes how a recipe computes a call, for `explain`.

    Attributes:
        way: the name of the way that the recipe has chosen; empty for a recipe with one way.
        reason: why, or what else is to say of it.
        dtype: the dtype that the recipe casts tensors to; None for a kernel.
        package: the distribution whose kernel computes it; empty if torch's does, or if it is unknown.
    """

    way: str = ""
    reason: str = ""
    dtype: torch.dtype | None = None
    package: str = ""


class Plan(ABC):
    """Computes the ops of one recipe with one backend, for a generation. Equal recipes share it.

    Attributes:
        generation: the number of the generation in which it was made.
        kernels: the kernels for the recipe by op: of each, the one that is asked first.
        FLOATS: the dtypes that recipes convert.
        NO_KERNEL, RECORDS, SMALL, SUBCLASS: reasons why a call falls back.
    """

    FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
    NO_KERNEL = "the backend has no kernel for it"
    RECORDS = "autograd records it, and quantized kernels have no backward"
    SMALL = "the weight is smaller than the recipe's min_size"
    SUBCLASS = "a tensor is of a subclass that sees each op itself, or has no memory"

    def __init__(self, backend: Backend, recipe: Recipe) -> None:
        self.generation = generation.number
        self.backend = backend
        self.recipe = recipe
        self.device_type = backend.device_type
        self.kernels: Mapping[str, LowBitKernel] = {}

    @abstractmethod
    def perform(self, op: str, args: Sequence[Any], cache: CastCache | None, checked: bool) -> Performed:
        """Compute an op, and :meth:`notify`.

        Args:
            op: by its name in the dispatcher.
            args: its arguments, in the order of the schema.
            cache: the region's WeightCache, or None.
            checked: whether the caller has checked that the tensors are floating-point, strided and on the device, that
                they are of no subclass or transform, that nothing intercepts ops, and that autograd records nothing.
        """

    @abstractmethod
    def compute(
        self, op: str, args: Sequence[Any], cache: CastCache | None, checked: bool = False
    ) -> tuple[torch.Tensor | str, Action | None]:
        """Compute an op, as compiled code does: notify nobody.

        Returns:
            Its result, or why it falls back; and the action that does the same for calls with the same metadata, or
            None if there is none.
        """

    def notify(self, op: str, reason: str | None, way: str = "", package: str = "") -> None:
        """Notify the listeners to ``events.recipe_call``, unless a compiler traces: compiled code does when it runs.

        Args:
            op: by its name in the dispatcher.
            reason: why the op falls back; None: it was computed.
            way: the way in which it was computed, of a recipe that has several.
            package: the distribution whose kernel computed it; empty if torch's did.
        """
        if events.recipe_call and tracing_context() is None:
            recipe = f"{self.recipe.short}:{way}" if way else self.recipe.short
            events.recipe_call.notify(self.device_type, recipe, op, reason, package)

    @abstractmethod
    def why_no_kernel(self, op: str) -> str | None:
        """Return why the recipe computes no call of an op; None if it may compute some."""

    @abstractmethod
    def why_not(self, op: str, args: Sequence[Any]) -> str | None:
        """Return why a call would fall back, given arguments that may be fake; None if it would not."""

    def package_of(self, op: str, args: Sequence[Any]) -> str:
        """Return the distribution whose kernel computes a call that does not fall back; empty if torch's does."""
        return ""

    @abstractmethod
    def explain(self, op: str, args: Sequence[Any], cache: CastCache | None, dtype: torch.dtype) -> Computed:
        """Return how a call that does not fall back is computed, given arguments that may be fake."""

    @staticmethod
    def is_special(tensor: torch.Tensor) -> bool:
        """Return whether a tensor is of a subclass that sees each op itself, or has no memory."""
        if type(tensor) in _PLAIN:
            return tensor.is_meta
        return tensor.is_meta or has_python_key(tensor)
