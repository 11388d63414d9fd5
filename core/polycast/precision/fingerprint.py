"""What a search is of, told shortly: two searches that could differ do so here."""

import ctypes
import hashlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from .calls import Call
from .values import tensors_in


def of_model(model: torch.nn.Module) -> str:
    """Return a digest of a model's class, mode, and the names and values of what it holds."""
    digest = hashlib.sha256(repr(type(model)).encode())
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module).__qualname__} {module.training}".encode())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            _add(digest, name, tensor)
    return digest.hexdigest()[:16]


def of_call(call: Call) -> str:
    """Return a digest of the tensors in a call."""
    digest = hashlib.sha256()
    for name, tensor in [*tensors_in(list(call.args)), *tensors_in(call.kwargs)]:
        _add(digest, name, tensor)
    return digest.hexdigest()[:16]


def of_function(function: Callable[..., Any]) -> str:
    """Return a function's name, and a digest of its code where it has some."""
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    digest = hashlib.sha256()
    _add_code(digest, code)
    return f"{name} {digest.hexdigest()[:16]}"


def _add_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def _add(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
        host = tensor.detach().cpu().contiguous()
        digest.update((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))
