"""Mixed precision on torch.distributed: FSDP2 with the dtypes of the registered backends.

torch's FSDP2 has one switch for casting the inputs of a unit. Here the root of a model and the units below it have one
each. Which unit is the root is known only at a forward, so torch is given an object whose truth value is computed then.

Regions under DDP and FSDP2 do not need this module. It imports torch's FSDP2 when a unit is made.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from polycast.plugin import get_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy
    from torch.distributed.tensor import Shard

__all__ = ["MixedPrecision", "fully_shard"]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_REMEDY = (
    "call torch.distributed.init_process_group() first, in each process (torchrun starts them and tells them their "
    "ranks), or pass mesh="
)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a sharded unit. Its sharded parameters, which the optimizer steps, keep their own dtype.

    Inputs are those of the unit's forward, and of methods registered by torch's ``register_fsdp_forward_method``.

    Args:
        param_dtype: the dtype of the gathered parameters. None: the default dtype of the backend of the unit's device.
        reduce_dtype: the dtype in which gradients are reduced over the processes. None: float32. In any case the
            gradients that the optimizer sees have the dtype of their parameters.
        output_dtype: the dtype that the unit's floating-point outputs are cast to. None: no cast.
        cast_root_forward_inputs: cast the floating-point inputs of the root unit to `param_dtype`. The root is the
            outermost unit with a mixed precision, or one that runs without the units around it.
        cast_forward_inputs: cast the floating-point inputs of each unit, root or not, that has parameters outside of
            its nested units.

    Raises:
        TypeError: a dtype is not a floating-point ``torch.dtype``, or a switch is not a bool.

    Example:
        >>> import torch
        >>> from polycast_plugins.distributed import MixedPrecision
        >>> MixedPrecision(param_dtype=torch.float16).cast_forward_inputs
        True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_root_forward_inputs: bool = True
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_dtype"):
                if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                    raise TypeError(f"{field.name} must be a floating-point torch.dtype or None, got {value!r}")
            elif not isinstance(value, bool):
                raise TypeError(f"{field.name} must be a bool, got {value!r}")


def fully_shard(
    module: _Module,
    *,
    mixed_precision: MixedPrecision | None = None,
    mesh: "DeviceMesh | None" = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: "Callable[[torch.nn.Parameter], Shard | None] | None" = None,
    offload_policy: "OffloadPolicy | None" = None,
    ignored_params: set[torch.nn.Parameter] | None = None,
) -> _Module:
    """Shard a module over processes, in place, as a unit of torch's FSDP2 with polycast's mixed precision.

    As with torch's function, shard nested modules first, then the model, and make the optimizer afterwards.

    Args:
        module: the module; its parameters that are in no unit yet become the unit's own.
        mixed_precision: the dtypes to compute in. None: the dtypes of the parameters, so that regions decide.
        mesh: the processes and their device. None: all processes, on this machine's accelerator, else on the cpu.
        reshard_after_forward: as torch's.
        shard_placement_fn: as torch's.
        offload_policy: as torch's.
        ignored_params: as torch's.

    Returns:
        `module`, whose class is now also a ``torch.distributed.fsdp.FSDPModule``.

    Raises:
        TypeError: `module` is not a module, or `mixed_precision` not a :class:`MixedPrecision`.
        RuntimeError: there is no `mesh` and no process group, or the module is sharded already.
        ValueError: the backend of the device cannot compute in the `param_dtype`.
        BackendNotFoundError: no backend is installed for the device (a RuntimeError).

    Example:
        >>> import torch
        >>> from polycast_plugins.distributed import MixedPrecision, fully_shard
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
        >>> model = fully_shard(torch.nn.Linear(2, 2), mixed_precision=MixedPrecision(), mesh=mesh)
        >>> model(torch.ones(1, 2)).dtype
        torch.bfloat16
        >>> torch.distributed.destroy_process_group()
    """
    _check_arguments(module, mixed_precision)
    from torch import distributed
    from torch.distributed import fsdp

    if mesh is None and not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(f"fully_shard needs a process group, and there is none: {_REMEDY}.")
    if isinstance(module, fsdp.FSDPModule):
        raise RuntimeError(f"{type(module).__name__} is sharded already: shard each module once.")
    given = {
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if mixed_precision is None:
        fsdp.fully_shard(module, mesh=mesh, **options)
        return module

    accelerator = torch.accelerator.current_accelerator(check_available=True)  # None where the build's is absent
    device_type = mesh.device_type if mesh is not None else accelerator.type if accelerator is not None else "cpu"
    dtype = _param_dtype(mixed_precision, device_type)
    casts = _InputCasts(
        module,
        as_root=mixed_precision.cast_root_forward_inputs,
        as_any=mixed_precision.cast_forward_inputs and _has_own_parameters(module, ignored_params or set()),
    )
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=mixed_precision.reduce_dtype or torch.float32,
        output_dtype=mixed_precision.output_dtype,
        cast_forward_inputs=casts,  # type: ignore[arg-type]  # torch takes its truth value at each forward
    )
    fsdp.fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    for unit in module.modules():
        nested = getattr(_fsdp_state(unit, "_mp_policy"), "cast_forward_inputs", None)
        if isinstance(nested, _InputCasts) and nested is not casts:
            nested.is_outermost = False
    return module


class _InputCasts:
    """A switch, true if a unit casts the inputs that it is given now.

    Attributes:
        is_outermost: whether no unit around this one has a mixed precision.
    """

    def __init__(self, module: torch.nn.Module, *, as_root: bool, as_any: bool) -> None:
        self._module = module
        self._as_root = as_root
        self._as_any = as_any
        self.is_outermost = True

    def __bool__(self) -> bool:
        return self._as_any or (self._as_root and (self.is_outermost or self._is_run_alone()))

    def _is_run_alone(self) -> bool:
        return bool(_fsdp_state(self._module, "_is_root"))


def _fsdp_state(module: torch.nn.Module, attribute: str) -> Any:
    """Return an attribute of torch's FSDP2 state of a module, which is private; None if there is none.

    Without these attributes `cast_root_forward_inputs` also applies to nested units, and not to units that run alone.
    """
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else getattr(state(), attribute, None)


def _check_arguments(module: object, mixed_precision: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"fully_shard expects a torch.nn.Module, got {type(module).__name__}: shard one module a call.")
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
        raise TypeError(
            f"mixed_precision must be a polycast_plugins.distributed.MixedPrecision or None, got "
            f"{type(mixed_precision).__name__}: build MixedPrecision(param_dtype=...) from it."
        )


def _param_dtype(mixed_precision: MixedPrecision, device_type: str) -> torch.dtype:
    backend = get_backend(device_type)
    dtype = mixed_precision.param_dtype or backend.default_dtype
    if dtype is not torch.float32:  # supported by every device
        answer = backend.dtype_availability(dtype)
        if not answer:
            raise ValueError(
                f"param_dtype {dtype} cannot be used on {device_type!r}: {answer.reason}. Pass a dtype that it "
                f"supports, or None for its default, {backend.default_dtype}."
            )
    return dtype


def _has_own_parameters(module: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> bool:
    from torch.distributed.fsdp import FSDPModule

    nested = {p for unit in module.modules() if isinstance(unit, FSDPModule) for p in unit.parameters()}
    return any(parameter not in nested and parameter not in ignored for parameter in module.parameters())
