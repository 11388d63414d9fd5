"""Call a function as if the caller had switched on nothing that intercepts ops.

The first use of a device may be anywhere: in a model that is traced, under a mode, in a transform. The calls that a
plugin makes to its library then, and the tensors that it makes and keeps, must not become part of these.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from typing_extensions import ParamSpec

from .lookup import torch_name
from .private_names import (
    are_functorch_transforms_active,
    dispatch_mode_count,
    is_function_mode_enabled,
    is_tracing,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_TRACED, _SEEN, _TRANSFORMED = (
    f"the first use of a device fails {where}, if its plugin runs ops then"
    for where in ("while torch.jit.trace runs", "under a mode that does not expect them", "in transforms of torch.func")
)

_tracing_state: Callable[[], Any] | None = torch_name("torch._C._get_tracing_state", None, _TRACED)
_set_tracing_state: Callable[[Any], None] | None = torch_name("torch._C._set_tracing_state", None, _TRACED)
_without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = torch_name(
    "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext, _SEEN
)
_function_mode_count: Callable[[], int] = torch_name("torch._C._len_torch_function_stack", lambda: 0, _SEEN)
_without_function_mode: Callable[[], contextlib.AbstractContextManager[Any]] = torch_name(
    "torch.overrides._pop_mode_temporarily", contextlib.nullcontext, _SEEN
)
_without_transforms: Callable[[], contextlib.AbstractContextManager[Any]] = torch_name(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", contextlib.nullcontext, _TRANSFORMED
)


def call_outside(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function outside of tracing, modes, transforms and inference mode, and return what it returns."""
    if not (
        is_tracing()
        or dispatch_mode_count()
        or are_functorch_transforms_active()
        or is_function_mode_enabled()
        or torch.is_inference_mode_enabled()
    ):
        return function(*args, **kwargs)
    with contextlib.ExitStack() as outside:
        outside.enter_context(_without_tracing())
        outside.enter_context(_without_dispatch_modes())
        for _ in range(_function_mode_count()):
            outside.enter_context(_without_function_mode())
        outside.enter_context(_without_transforms())
        outside.enter_context(torch.inference_mode(False))
        return function(*args, **kwargs)


@contextlib.contextmanager
def _without_tracing() -> Iterator[None]:
    state = None if _tracing_state is None else _tracing_state()
    if state is None or _set_tracing_state is None:  # set nothing: while an op runs, the state cannot be set
        yield
        return
    try:
        _set_tracing_state(None)
        yield
    finally:
        _set_tracing_state(state)
