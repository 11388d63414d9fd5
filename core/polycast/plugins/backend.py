"""What a plugin supplies: a backend, and the contract it has to keep."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch

from ..errors import InvalidBackendError
from ..policy.cast_policy import CastPolicy
from ..policy.recipe import Recipe
from ..policy.validation import table_problems
from ..torch_internals.dispatcher import OpOverload, is_autocast_available

KernelKey: TypeAlias = tuple[OpOverload, torch.dtype, torch.dtype]
"""(op, input dtype, output dtype)"""


@dataclass(frozen=True)
class Availability:
    """The answer of a check: whether something can be used now and, if not, why.

    Raises:
        TypeError: `available` is not a bool, or `reason` not a str.

    Example:
        >>> import polycast
        >>> polycast.Availability(False, "no device is plugged in").available
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


class LowBitKernel:
    """What computes one op by a recipe, on the weights of a model as they are. Of products, see `LowBitMatmul`.

    The op's arguments come in the order of its schema, all of them. Tensors are on the device, strided, and of float32,
    bfloat16 or float16, as the caller gave them. polycast keeps what the weight is packed into as long as the weight is
    what it was.

    Attributes:
        weight: the position of the weight among the op's arguments.
        packing: kernels for which this is equal, among those of one backend, share what a weight is packed into. None:
            it shares with no other.
    """

    weight: int = 1
    prepack_key: Hashable = None

    def prepack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Return what the weight is packed into, of tensors that nothing else uses; None where this weight cannot be.

        Called without autograd and outside of autocast. What is asked of the weight here takes its time once for each
        state of the weight, so this may look at its values.

        Args:
            weight: float32, bfloat16 or float16.
        """
        raise NotImplementedError

    def unsupported_reason(self, *args: Any) -> str | None:
        """Say why this call is not for the kernel, in words for people; None: it is.

        Asked of every call, also while compilers trace, of fake tensors: it may look at dtypes, sizes and strides, and
        at no values.
        """
        return None

    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        """Return what the op returns, in the fast dtype, which is ``torch.get_autocast_dtype`` of the device.

        Called outside of autocast, where autograd has nothing to record. The weight itself is not to be read.
        """
        raise NotImplementedError


class Backend:
    """Autocast for one device type. A plugin subclasses it and returns an instance from its hook.

    Attributes:
        device_type: the device type as torch spells it, such as ``"cuda"``. torch must have an Autocast key for it.
        default_dtype: the fast dtype of a region that names none; floating point, one of `supported_dtypes`.
        policies: the policy of each op that autocast treats, by its name in the dispatcher (``"aten::norm.Scalar"``).
            Ops that the running torch lacks are skipped; those of other libraries are cast from the first region on
            that is entered when they are there.
        kernels: kernels of the device that compute an op with another output dtype than its inputs', for
            :func:`polycast.out_dtype`; may be empty. A kernel is called with the op's arguments, of which each tensor
            has the input or the output dtype, outside of autocast and without autograd. It returns a tensor in the
            output dtype, or NotImplemented for arguments that it leaves to torch.
        remedies: for a BANNED op a sentence that says what to use in its place; may be empty.
        excluded_ops: the ops that torch itself treats for the device and that are not in `policies` on purpose, so
            that torch's own kernels serve them, each with the reason; may be empty.
        ops_in_cpp: the packages whose C++ the backend has compiled by :func:`polycast.load_ops`, so that
            ``polycast build`` can do it ahead of their first use; may be empty.
    """

    device_type: str
    default_dtype: torch.dtype
    policies: Mapping[str, CastPolicy]
    kernels: Mapping[KernelKey, Callable[..., Any]] = MappingProxyType({})
    remedies: Mapping[str, str] = MappingProxyType({})
    excluded_ops: Mapping[str, str] = MappingProxyType({})
    ops_in_cpp: Sequence[str] = ()

    _required: ClassVar[tuple[str, ...]] = ("device_type", "default_dtype", "policies")

    def supported_dtypes(self) -> Sequence[torch.dtype]:
        """Return the fast dtypes that the device can compute in, now; where the device is absent, in general."""
        raise NotImplementedError

    def availability(self) -> Availability:
        """Return whether the device can be used now and, if not, why. An exception counts as unavailable."""
        raise NotImplementedError

    def dtype_availability(self, dtype: torch.dtype) -> Availability:
        """Say whether a region can have `dtype` as its fast dtype and, if not, why.

        Override it where there is more to say than which dtypes are supported.
        """
        supported = self.supported_dtypes()
        if dtype in supported:
            return Availability(True)
        return Availability(False, f"{self.device_type} supports {', '.join(map(str, supported))}")

    def slow_reason(self, dtype: torch.dtype) -> str | None:
        """Say why a fast dtype is slow: what the device lacks to compute in it. None: it is not, as far as is known.

        :func:`polycast.observe` tells who computes in it.
        """
        return None

    def recipe_availability(self, recipe: Recipe) -> Availability:
        """Say whether the device can compute by a recipe now and, if not, why: then the fast dtype is used.

        The reason of one that can is a warning: of a recipe that is experimental, say. It is given once.
        """
        return Availability(False, f"the backend for {self.device_type} has no kernels for {recipe.kind}")

    def low_bit_kernels(self, recipe: Recipe) -> Mapping[str, LowBitKernel]:
        """Return the kernels for a recipe that is available, by the name of the op (``"aten::linear"``).

        Asked once for each recipe. It may offer kernels for ops that the recipe does not name.
        """
        return {}

    def is_capturing(self) -> bool:
        """Say whether the device is recording a graph (as CUDA graphs do): no cast is kept from one then.

        By default what the device's current stream says, where the streams of the running torch can tell (from torch
        2.12 on; the native engine asks them without Python). Override it for a device whose streams do not know.
        """
        return STREAMS_TELL and _current_stream_captures(self.device_type)


STREAMS_TELL = hasattr(torch.Stream, "is_capturing")
"""Whether a stream of the running torch knows that it records a graph."""


def _current_stream_captures(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return False
    is_initialized = getattr(getattr(torch, device_type, None), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return False  # to ask for a stream would start the device
    try:
        captures: bool = torch.accelerator.current_stream().is_capturing()
    except RuntimeError as error:  # what torch 2.12 has where newer ones say no: for a device without graphs
        if "stream capture query" not in str(error):
            raise
        return False
    return captures


def validate(backend: object, device_type: str | None = None) -> Backend:
    """Return `backend` if it keeps the contract.

    Args:
        backend: what a plugin's hook or a caller of ``register_backend`` supplied.
        device_type: the device type that it has to be for, where that is known (the entry point's name).

    Raises:
        InvalidBackendError: it does not; the message lists every problem.
    """
    if not isinstance(backend, Backend):
        what = (
            f"the class {backend.__name__}" if isinstance(backend, type) else f"{type(backend).__name__}: {backend!r}"
        )
        raise InvalidBackendError(f"expected an instance of polycast.Backend, got {what}")
    problems = [f"{name} is missing" for name in Backend._required if not hasattr(backend, name)]
    if not problems:
        problems += _device_problems(backend.device_type, device_type)
        problems += _dtype_problems(backend.default_dtype)
        problems += [f"policies: {problem}" for problem in table_problems(backend.policies)]
    problems += _kernel_problems(backend.kernels)
    problems += _text_problems("remedies", backend.remedies)
    problems += _text_problems("excluded_ops", backend.excluded_ops)
    problems += _package_problems(backend.ops_in_cpp)
    problems += [
        f"{name}() is not implemented"
        for name in ("supported_dtypes", "availability")
        if getattr(type(backend), name) is getattr(Backend, name)
    ]
    if problems:
        raise InvalidBackendError(
            f"{type(backend).__module__}.{type(backend).__qualname__} does not keep the contract of polycast.Backend:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    return backend


def _device_problems(device_type: object, expected: str | None) -> list[str]:
    if not isinstance(device_type, str):
        return [f"device_type must be a str, got {device_type!r}"]
    if expected is not None and device_type != expected:
        return [f"device_type is {device_type!r}, but the entry point is named {expected!r}: they must be equal"]
    try:
        known = torch.device(device_type)
    except RuntimeError:
        return [f"device_type {device_type!r} is not a device that torch knows; an out-of-tree device is named first"]
    if known.type != device_type or known.index is not None:
        return [f"device_type {device_type!r} must be a type without an index: {known.type!r}"]
    if not is_autocast_available(device_type):
        return [f"torch has no Autocast dispatch key for {device_type!r}"]
    return []


def _dtype_problems(dtype: object) -> list[str]:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return []
    return [f"default_dtype must be a floating-point torch.dtype, got {dtype!r}"]


def _kernel_problems(kernels: object) -> list[str]:
    if not isinstance(kernels, Mapping):
        return [f"kernels must map (OpOverload, input dtype, output dtype) to a callable, got {type(kernels).__name__}"]
    problems = [
        f"kernels: {key!r} must be (OpOverload, input dtype, output dtype), and its kernel callable"
        for key, kernel in kernels.items()
        if not (
            isinstance(key, tuple)
            and len(key) == 3
            and isinstance(key[0], OpOverload)
            and all(isinstance(dtype, torch.dtype) for dtype in key[1:])
            and callable(kernel)
        )
    ]
    return problems or [
        f"kernels: {op} must be a functional op that returns one tensor"
        for op in dict.fromkeys(op for op, _, _ in kernels)
        if op._schema.is_mutable or [type(result.type) for result in op._schema.returns] != [torch.TensorType]
    ]


def _text_problems(attribute: str, texts: object) -> list[str]:
    if isinstance(texts, Mapping) and all(isinstance(text, str) for pair in texts.items() for text in pair):
        return []
    return [f"{attribute} must map op names to sentences"]


def _package_problems(packages: object) -> list[str]:
    if isinstance(packages, (list, tuple)) and all(
        isinstance(package, str) and all(part.isidentifier() for part in package.split(".")) for package in packages
    ):
        return []
    return [f"ops_in_cpp must be a list or tuple of the names of packages, got {packages!r}"]
