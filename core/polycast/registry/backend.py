"""`Backend`, which a plugin subclasses, and its contract."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from ..common.versions import API_VERSION
from ..policy.cast_policy import CastPolicy
from ..policy.matching import MATCHED, MATCHED_ON_ALL_DEVICES
from ..torch_internals.dispatcher import OpOverload

if TYPE_CHECKING:
    from ..policy.recipe import Recipe

KernelKey: TypeAlias = tuple[OpOverload, torch.dtype, torch.dtype]
"""(op, input dtype, output dtype)"""


@dataclass(frozen=True)
class Availability:
    """Whether something can be used now and, if not, why.

    Raises:
        TypeError: `available` is not a bool, or `reason` not a str.

    Example:
        >>> import polycast
        >>> polycast.plugin.Availability(False, "no device is plugged in").available
        False
    """

    available: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.available, bool) or not isinstance(self.reason, str):
            raise TypeError(
                f"an Availability has a bool and a str, the reason; got {self.available!r}, {self.reason!r}"
            )

    def __bool__(self) -> bool:
        return self.available


_AVAILABLE = Availability(True)
_NONE: Mapping[str, CastPolicy] = MappingProxyType({})
"""The policies of an extension that has none."""


class LowBitKernel:
    """Computes one op by a recipe, with the unmodified weights of a model.

    ``polycast_plugins.quantize.LowBitMatmul`` makes those of matmuls. A kernel gets all arguments of the op in the
    order of its schema. Tensors are on the device, strided, and float32, bfloat16 or float16. polycast caches the
    prepacked weight until the weight changes.

    Attributes:
        weight: the position of the weight among the op's arguments.
        prepack_key: a backend's kernels with equal keys share prepacked weights. None: the kernel does not share.
        operator: optional; an operator in C++ that computes the op: ``operator(*args, *prepacked, dtype, *constants)``,
            with the op's arguments and the fast dtype. The native engine calls it without entering Python once the
            weight is prepacked.
        constants: the last arguments of `operator`: numbers, strings, dtypes or None.
        uses_cast: whether the kernel multiplies the weight's cast to the fast dtype. `prepack` is not called then: the
            prepacked weight is the cast, a tuple of one tensor, with the weight's strides if they are dense.
        takes_float32: whether a kernel with `uses_cast` also takes a float32 weight itself in place of its cast.
        equalizes: whether ``prepack(weight, factors)`` takes the factors of a ``Calibration``: positive float32 [K] in
            host memory, by which the weight is multiplied before it is quantized, and the activations divided; or None.
        levels: the format of the levels of a ``Calibration`` that ``prepack(weight, factors, levels)`` takes, such as
            ``"int4, groups of 32"``; see ``polycast_plugins.quantize.LowBitMatmul.compensate``.
    """

    weight: int = 1
    prepack_key: Hashable = None
    operator: OpOverload | None = None
    constants: Sequence[Any] = ()
    uses_cast: ClassVar[bool] = False
    takes_float32: ClassVar[bool] = False
    equalizes: bool = False
    levels: str = ""

    def prepack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Return the prepacked weight, tensors with memory of their own; None if this weight cannot be prepacked.

        Called once for each state of the weight, on the reference engine at each use, without autograd and outside of
        autocast. It may read its values.

        Args:
            weight: float32, bfloat16 or float16.
        """
        raise NotImplementedError

    def unsupported_reason(self, *args: Any) -> str | None:
        """Return why the kernel does not support a call, for messages; None if it does.

        Called with fake tensors too. It may read dtypes, sizes, strides, devices, `requires_grad` and the grad mode,
        but no values. The native engine keeps the answer, which must depend on nothing else.
        """
        return None

    def run(self, prepacked: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        """Return the op's result in the fast dtype: ``torch.get_autocast_dtype`` of the device.

        Called outside of autocast and, except for elementwise ops of one tensor, when autograd has nothing to record.
        It must not read the weight itself, except in these ops, where the weight is the input. The default calls
        `operator`.
        """
        if self.operator is None:
            raise NotImplementedError(f"{type(self).__name__} has neither an operator nor run()")
        dtype = torch.get_autocast_dtype(args[self.weight].device.type)
        result: torch.Tensor = self.operator(*args, *prepacked, dtype, *self.constants)
        return result


def no_kernels(device_type: str, recipe: "Recipe") -> str:
    """Return the reason of those that have no kernels for a recipe."""
    return f"there are no kernels for {recipe.kind} on {device_type}"


class Extension:
    """Adds policies and kernels to a device that another package serves. A plugin returns an instance from its hook.

    Attributes:
        device_type: the device type as torch spells it, such as ``"cuda"``.
        policies: the policy of each op that autocast casts, by dispatcher name (``"acme::attend"``). Ops of the
            backend's own table keep their policy there. Two packages that give an op different policies are a conflict.
        ops_in_cpp: optional; the packages that are passed to :func:`polycast.plugin.load_ops`, which
            ``polycast build`` compiles ahead of their first use.
        api: the version of this contract that the class is written for, such as 1; by default the running one,
            :data:`polycast.plugin.API_VERSION`. One that is not supported is refused.
    """

    api: int = API_VERSION
    device_type: str
    policies: Mapping[str, CastPolicy] = _NONE
    ops_in_cpp: Sequence[str] = ()

    def availability(self) -> Availability:
        """Return whether this can be used now and, if not, why. An exception counts as unavailable.

        An extension is asked once, when its device is first used, and may look that up, which has no extension then. It
        must be quick: compile no C++ here.
        """
        return _AVAILABLE

    def recipe_availability(self, recipe: "Recipe") -> Availability:
        """Return whether there are kernels for a recipe now and, if not, why.

        The fast dtype is used if no package has any. A reason with a positive answer, for example that the recipe is
        experimental, is issued as a warning, once.
        """
        if not recipe.needs_kernels:
            return _AVAILABLE
        return Availability(False, no_kernels(self.device_type, recipe))

    def low_bit_kernels(self, recipe: "Recipe") -> Mapping[str, LowBitKernel]:
        """Return the kernels for an available recipe, by dispatcher name of the op (``"aten::linear"``).

        Called once for each recipe. It may return kernels for ops that the recipe does not name. If several packages
        have a kernel for an op, the first that supports a call computes it: that of the backend, then those of other
        packages in the order of their names, then polycast's own.
        """
        return {}

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__}: {getattr(self, 'device_type', '?')}>"


class Backend(Extension):
    """Autocast for one device type. A plugin subclasses it and returns an instance from its hook.

    Attributes:
        device_type: the device type as torch spells it, such as ``"cuda"``. torch must have an Autocast key for it.
        default_dtype: the default fast dtype; floating point, one of `supported_dtypes`.
        policies: the policy of each op that autocast casts, by dispatcher name (``"aten::norm.Scalar"``). Ops that the
            running torch lacks are skipped; ops of another library are cast once the library is loaded.
        kernels: optional kernels that compute an op with an output dtype that differs from the inputs', for
            :func:`polycast.out_dtype`. A kernel gets the op's arguments, with tensors in the input or the output dtype,
            outside of autocast and without autograd. It returns a tensor in the output dtype, or NotImplemented for
            arguments that it does not support.
        remedies: optional; for a BANNED op, a sentence that says what to use instead; those that torch bans on
            accelerators have one.
        excluded_ops: optional; ops that torch's own autocast casts on the device and that `policies` omits, or has with
            another policy, on purpose, each with the reason.
        added_ops: optional; ops of `policies` that torch's own autocast does not cast on the device, each with the
            reason.
        optional_ops: optional; named ops that a torch which the backend supports may lack, each with the reason. The
            conformance suite fails for other ops that the running torch lacks: they may be misspelled.
        is_verified: whether the conformance suite has passed on the device itself. If so, `matched_ops` includes the
            ops for which the device's kernels decide whether they accept mixed dtypes.
        missing_kernels: optional; the dtypes narrower than float32 that the device has no kernels for, by op or by
            layout. An op with LOWER_PRECISION_FP runs in float32 if the fast dtype is missing for it, or for the layout
            of one of its inputs. An op without a policy gets MATCH, which casts inputs of a missing dtype.
        caches_casts: whether casts of weights are cached. If not, each use casts a weight again; a `WeightCache` caches
            what recipes prepack, and no casts.

    It may have kernels for recipes, ops in C++, and an `api`, as an :class:`Extension` has: see there.
    """

    default_dtype: torch.dtype
    kernels: Mapping[KernelKey, Callable[..., Any]] = MappingProxyType({})
    remedies: Mapping[str, str] = MappingProxyType({})
    excluded_ops: Mapping[str, str] = MappingProxyType({})
    added_ops: Mapping[str, str] = MappingProxyType({})
    optional_ops: Mapping[str, str] = MappingProxyType({})
    is_verified: bool = False
    missing_kernels: Mapping[str | torch.layout, Collection[torch.dtype]] = MappingProxyType({})
    caches_casts: bool = True

    @property
    def matched_ops(self) -> frozenset[str]:
        """The ops that have the policy MATCH without being in `policies`, by dispatcher name."""
        missing = (name for name in self.missing_kernels if isinstance(name, str))
        return (MATCHED if self.is_verified else MATCHED_ON_ALL_DEVICES).union(missing).difference(self.policies)

    def missing_dtypes(self, op: str, values: Iterable[object] = ()) -> frozenset[torch.dtype]:
        """Return the dtypes for which the device has no kernel of an op with arguments of these layouts."""
        keys: list[str | torch.layout] = [op, *(value.layout for value in values if isinstance(value, torch.Tensor))]
        return frozenset(dtype for key in keys for dtype in self.missing_kernels.get(key, ()))

    @staticmethod
    def float32_products(has_kernel: Callable[[Any], bool]) -> Mapping[KernelKey, Callable[..., Any]]:
        """Return items of `kernels`: ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` of reduced dtypes in float32.

        Args:
            has_kernel: returns whether the device has a kernel for an op; called with ``aten::mm.dtype`` and
                ``aten::bmm.dtype``, which these kernels need.

        Example:
            >>> import polycast
            >>> len(polycast.plugin.Backend.float32_products(lambda op: True))
            8
        """
        from .matmul_kernels import float32_products  # few devices have these

        return float32_products(has_kernel)

    def supported_dtypes(self) -> Sequence[torch.dtype]:
        """Return the fast dtypes that the device supports; if it is absent, those that such devices support."""
        raise NotImplementedError

    def availability(self) -> Availability:
        """Return whether the device can be used now and, if not, why. An exception counts as unavailable.

        A reason with a positive answer, for example that support is experimental, is issued as a warning, once. A
        positive answer, also for a dtype or a recipe, is kept until :func:`polycast.plugin.refresh`.
        """
        raise NotImplementedError

    def dtype_availability(self, dtype: torch.dtype) -> Availability:
        """Return whether the device supports `dtype` as a fast dtype and, if not, why.

        Override it to give a better reason than the list of supported dtypes.
        """
        supported = self.supported_dtypes()
        if dtype in supported:
            return _AVAILABLE
        return Availability(False, f"{self.device_type} supports {', '.join(map(str, supported))}")

    def slow_reason(self, dtype: torch.dtype) -> str | None:
        """Return why a fast dtype is slow on the device, for warnings; None if it is not.

        A measured profile takes precedence.
        """
        return None

    def device_details(self) -> Mapping[str, str]:
        """Return the name of the device, under ``"name"``, and what else its speed depends on, such as a driver,
        or torch's settings that select kernels.

        A profile of the device (:func:`polycast.profile`) is used only while these stay the same.
        """
        try:
            name = torch.get_device_module(self.device_type).get_device_name()
        except (AttributeError, AssertionError, RuntimeError):  # torch has no such module, or finds no device
            name = self.device_type
        return {"name": str(name)}

    def is_capturing(self) -> bool:
        """Return whether the device is recording a graph, such as a CUDA graph: no cast is cached then.

        The default asks the device's current stream (torch 2.12 and newer). Override it if the stream does not know.
        """
        return STREAMS_KNOW_CAPTURE and _current_stream_captures(self.device_type)

    def __repr__(self) -> str:
        device, dtype = getattr(self, "device_type", "?"), getattr(self, "default_dtype", "?")  # it may be incomplete
        return f"<{type(self).__module__}.{type(self).__qualname__}: {device}, default {dtype}>"


STREAMS_KNOW_CAPTURE = hasattr(torch.Stream, "is_capturing")


def overrides_is_capturing(backend: Backend) -> bool:
    """Return whether a backend, by its class or itself, has an ``is_capturing`` of its own."""
    return type(backend).is_capturing is not Backend.is_capturing or "is_capturing" in vars(backend)


def _current_stream_captures(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return False
    is_initialized = getattr(getattr(torch, device_type, None), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return False  # asking for a stream would initialize the device
    try:
        captures: bool = torch.accelerator.current_stream().is_capturing()
    except RuntimeError as error:  # torch 2.12 raises it for a device without graphs
        if "stream capture query" not in str(error):
            raise
        return False
    return captures
