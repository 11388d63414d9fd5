"""``map_weights``: save the parameters of a model, and map them from the file.

The file has one tensor for each block of memory. A contiguous parameter that shares its memory with no other is a
block as it is, with its name, shape and dtype. Another block has the elements, or for several dtypes the bytes, of all
that lies in the memory, in order. Shapes and strides are those of the model, so only bytes have to be compared.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from polycast.plugin import dtype_name, events, memory_of, torch_name

from .tensor_file import TensorFile, can_be_written, write

_Blocks: TypeAlias = Mapping[str, Sequence[torch.Tensor]]
"""By name, the tensors of a model that share memory: the parameter of the name, and others that are views of it."""

_CHUNK = 2**18
_use_count: Callable[[int], int] = torch_name(
    "torch._C._storage_Use_Count", lambda storage: 0, "map_weights does not see who else holds the memory of a weight"
)


@events.own_work.during()
def map_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save the parameters of a model to a file, if there is none, and map them from it into memory.

    The memory that they had is freed. The pages of the file are read when they are used, shared by all processes that
    map it, and dropped by the system when memory is scarce. The parameters stay the same objects, with their shapes,
    strides, dtypes and gradients; tied ones, and buffers that share memory with them, stay tied; optimizers go on
    using them. What is written to a parameter, as in training, is in memory of this process, and never in the file.

    A file that exists is never overwritten, and used only if it has the model's parameters, by name, with the same
    shapes, dtypes and bytes, of which all are compared. It may be any safetensors file, and have more tensors. Do not
    overwrite it in place, as ``cp`` does, while it is mapped: to write another one, remove it first.

    Call it before the first use of the model, since what is cached of the weights has to be made again, and while no
    other thread uses the model. If it raises an error or is interrupted, the model is unchanged. A NumPy array that a
    parameter was made of does not share its memory any longer.

    Args:
        model: a module, with all parameters in memory of the CPU. Other buffers are left where they are.
        path: a safetensors file. It is written beside `path` and then moved there.

    Raises:
        OSError: the file cannot be written or read.
        TypeError: `model` is not a module.
        ValueError: the file has other weights, or is damaged; or a parameter is on another device, has no values yet,
            is no plain tensor, was made in inference mode, or shares its memory with something outside of the model.
        RuntimeError: a parameter was written meanwhile.

    Example:
        >>> import os, tempfile, torch, polycast
        >>> model = torch.nn.Linear(8, 8)
        >>> polycast.map_weights(model, os.path.join(tempfile.mkdtemp(), "weights.safetensors"))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    with torch.inference_mode(False), torch.no_grad():
        blocks = _blocks_of(model)
        versions = [tensor._version for block in blocks.values() for tensor in block]
        target = Path(path)
        if not target.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                write(target, {name: _memory(block) for name, block in blocks.items()}, {}, replaces=False)
        try:
            mapped = _checked(TensorFile(target), blocks)
        except ValueError as error:
            remedy = "Remove it to have it written again, or pass another path."
            raise ValueError(f"The model's weights cannot be mapped from {str(target)!r}: {error}. {remedy}") from error
        if versions != [tensor._version for block in blocks.values() for tensor in block]:
            raise RuntimeError(
                "A weight was written while the weights were mapped: map them while no thread uses them."
            )
        _replace([each for name, block in blocks.items() for each in _views(block, mapped[name])])
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None:
        trim(0)  # glibc keeps freed blocks of up to 32 MiB otherwise


def _blocks_of(model: nn.Module) -> _Blocks:
    """Return the blocks of the parameters.

    Raises:
        ValueError: some cannot be mapped.
    """
    parameters = {name.replace("_orig_mod.", ""): each for name, each in model.named_parameters()}
    for name, parameter in parameters.items():
        if why := _why_not(parameter):
            raise ValueError(f"The weights cannot be mapped: the parameter {name!r} {why}.")
    names = {_storage(parameter): name for name, parameter in reversed(parameters.items())}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in reversed(names.values())}
    members = [*parameters.values(), *(buffer for buffer in model.buffers() if not _why_not(buffer))]
    members += [each._base for each in members if each._base is not None]  # which may have no other holder
    for each in {id(each): each for each in members}.values():
        if _storage(each) in names:
            found[names[_storage(each)]].append(each)
    uses, objects = _references(torch.empty(1))
    for name, block in found.items():
        held = _references(block[0])
        if held[0] > uses + len(block) - 1 or held[1] > objects:
            raise ValueError(
                f"The weights cannot be mapped: something else holds the memory of {name!r}, such as a state dict, "
                "x = weight.data or an array. Delete it first: its values would no longer be those of the parameter."
            )
    return found


def _why_not(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be mapped, or ""."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return "has no values yet: load them first"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
        return f"is no plain tensor but {type(tensor).__name__}, {tensor.layout}"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return f"is no plain tensor of {dtype_name(tensor.dtype)}: it is quantized, conjugated or negated"
    if not tensor.is_cpu:
        return f"is on the device {tensor.device}: only memory of the CPU is mapped"
    if tensor.is_inference():
        return "was made in inference mode, in which torch counts no writes"
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        return "is in memory that other processes may write"
    return ""


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many tensors, and how many objects of Python, hold the storage of a tensor."""
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the bytes of a tensor begin and end in its storage."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = last + 1 if tensor.numel() else 0
    return begin * tensor.element_size(), (begin + count) * tensor.element_size()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _memory(block: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the memory of a block, as the tensor that the file has."""
    first = block[0]
    if first.is_contiguous() and can_be_written(first) and len(set(map(_layout, block))) == 1:
        return first
    begin, end = min(_range(each)[0] for each in block), max(_range(each)[1] for each in block)
    is_simple = can_be_written(first) and len({each.dtype for each in block}) == 1
    dtype = first.dtype if is_simple else torch.uint8
    return _view(first.untyped_storage(), dtype, begin, ((end - begin) // dtype.itemsize,), (1,))


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, begin: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, begin // dtype.itemsize, tuple(shape), tuple(strides))


def _checked(file: TensorFile, blocks: _Blocks) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that have the bytes of the blocks.

    Raises:
        ValueError: one is missing or different.
    """
    found = {}
    for name, block in blocks.items():
        here, there = _memory(block), file.tensor(name)
        if (there.dtype, there.shape) != (here.dtype, here.shape):
            sizes = (f"{dtype_name(each.dtype)} {list(each.shape)}" for each in (there, here))
            raise ValueError(f"{name!r} is {' in it, and '.join(sizes)} in the model")
        one, other = memory_of(here), memory_of(there)
        for begin in range(0, len(one), _CHUNK):
            if bytes(one[begin : begin + _CHUNK]) != bytes(other[begin : begin + _CHUNK]):
                raise ValueError(f"{name!r} has other values in it")
        found[name] = there
    return found


def _views(block: Sequence[torch.Tensor], mapped: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor of a block, and the tensor of the same layout in the mapped block."""
    begin = min(_range(each)[0] for each in block) - _range(mapped)[0]
    storage = mapped.untyped_storage()
    return [(each, _view(storage, each.dtype, _range(each)[0] - begin, each.shape, each.stride())) for each in block]


def _replace(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give the first tensor of each pair the memory of the second; none of them if that fails."""
    with contextlib.ExitStack() as undo:
        for tensor, other in pairs:
            undo.callback(setattr, tensor, "data", tensor.data)
            tensor.data = other
        undo.pop_all()
