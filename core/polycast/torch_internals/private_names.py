"""Private names of torch outside the dispatcher: tracing and modes, autograd, compilers, ``out_dtype``."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from .dispatcher import dispatch_key
from .lookup import torch_name

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

# ---- Tracing, transforms and modes.

_TRANSFORMS_UNKNOWN = "whether ops are transformed is unknown: recipes compute nothing"
_WRITES_UNDER_FUNCTORCH = "rules lose what modules under torch.func write to arguments that are cast"
_SUMMED_UNDER_MODES = "on the reference engine, gradients of a weight are summed in float32 under dispatch modes"
_NOT_CACHED = "compiled code casts the weights of a WeightCache at each call"

is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
dispatch_mode_count: Callable[[], int] = torch_name(
    "torch._C._len_torch_dispatch_stack", lambda: 1, _TRANSFORMS_UNKNOWN
)
_dispatch_mode: Callable[[Any], Any] = torch_name(
    "torch._C._get_dispatch_mode", lambda key: object(), _SUMMED_UNDER_MODES
)
_TRACING_MODES: Any = torch_name("torch._C._TorchDispatchModeKey", None, _SUMMED_UNDER_MODES)
are_functorch_transforms_active: Callable[[], bool] = torch_name(
    "torch._C._are_functorch_transforms_active", lambda: True, _TRANSFORMS_UNKNOWN
)
_is_functorch_wrapped: Callable[[torch.Tensor], bool] = torch_name(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False, _WRITES_UNDER_FUNCTORCH
)
_functorch_unwrapped: Callable[[torch.Tensor], torch.Tensor] | None = torch_name(
    "torch._C._functorch.get_unwrapped", None, _WRITES_UNDER_FUNCTORCH
)
is_cached_tensor: Callable[[torch.Tensor], bool] = torch_name(
    "torch._C._is_cached_tensor",
    lambda tensor: False,
    "recipes take outputs of CUDA graph trees for weights",
)
_has_level = torch_name("torch.autograd.forward_ad._current_level", None, _TRANSFORMS_UNKNOWN) is not None


def is_traced_by_modes() -> bool:
    """Return whether torch's own dispatch modes trace ops, which do not run."""
    keys = () if _TRACING_MODES is None else (_TRACING_MODES.FAKE, _TRACING_MODES.PROXY, _TRACING_MODES.FUNCTIONAL)
    return not keys or any(_dispatch_mode(key) is not None for key in keys)


def is_forward_ad_active() -> bool:
    """Return whether forward-mode AD is active."""
    return not _has_level or forward_ad._current_level >= 0


tree_map: Callable[[Callable[[Any], Any], Any], Any] = torch_name(
    "torch.utils._pytree.tree_map",
    lambda function, value: function(value),
    "rules for what modules return do not cast tensors in containers",
)
is_function_mode_enabled: Callable[[], bool] = torch_name(
    "torch._C._is_torch_function_mode_enabled", lambda: True, "regions are entered more slowly"
)
function_modes: Callable[[], list[Any]] = torch_name(
    "torch.overrides._get_current_function_mode_stack",
    lambda: [],
    "torch.export(strict=False) leaves out the regions of a model",
)
enter_autocast: Callable[..., Any] | None = torch_name(
    "torch.amp.autocast_mode._enter_autocast", None, "torch.export(strict=False) refuses models with regions"
)
exit_autocast: Callable[..., Any] | None = torch_name(
    "torch.amp.autocast_mode._exit_autocast", None, "torch.export(strict=False) refuses models with regions"
)
_dispatch_keys: Callable[[torch.Tensor], Any] | None = torch_name(
    "torch._C._dispatch_keys", None, "recipes do not compute with subclasses of tensors"
)


def has_python_key(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's ops are dispatched to Python, or this torch does not say."""
    return _dispatch_keys is None or bool(_dispatch_keys(tensor).has(dispatch_key("Python")))


def is_intercepted() -> bool:
    """Return whether forward-mode AD, a functorch transform or torch.jit.trace sees the ops of this thread."""
    return is_forward_ad_active() or are_functorch_transforms_active() or is_tracing()


is_functional_tensor: Callable[[torch.Tensor], bool] = torch_name(
    "torch._is_functional_tensor", lambda tensor: False, "recipes compute nothing in compiled code"
)
_from_functional_tensor: Callable[[torch.Tensor], torch.Tensor] = torch_name(
    "torch._from_functional_tensor", lambda tensor: tensor, _NOT_CACHED
)


def behind_functional_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a ``FunctionalTensor`` of AOTAutograd wraps, or None for any other tensor."""
    elem = getattr(tensor, "elem", None)
    if not isinstance(elem, torch.Tensor) or not is_functional_tensor(elem):
        return None
    return _from_functional_tensor(elem)


def replayed_view(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """Return the view of another base that a view is of its own; None if this torch cannot replay views."""
    replay = getattr(view, "_view_func_unsafe", None)
    return None if replay is None else replay(base)


# ---- Autograd and memory.


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write to a tensor; 0 for a tensor made in inference mode, which has none."""
    try:
        version = tensor._version
    except RuntimeError:
        return 0
    if are_functorch_transforms_active():  # each level of which counts its own writes
        while _functorch_unwrapped is not None and _is_functorch_wrapped(tensor):
            tensor = _functorch_unwrapped(tensor)
            version += tensor._version
    return version


is_fwd_grad_enabled: Callable[[], bool] = torch_name(
    "torch._C._is_fwd_grad_enabled", lambda: False, "recipes compute under torch.inference_mode() only"
)
current_graph_task_id: Callable[[], int] = torch_name(
    "torch._C._current_graph_task_id", lambda: 0, "recipes compute under torch.inference_mode() only"
)
tensor_base: Any = torch.Tensor.__base__
is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = torch_name(
    "torch._C._is_alias_of", lambda tensor, other: False, "views of weights are cast at each use"
)


# ---- Compilers.

tracing_context: Callable[[], Any] = torch_name(
    "torch._guards.TracingContext.try_get",
    lambda: None,
    f"{_NOT_CACHED}, and computes gradients of what policies keep in float32 in the fast dtype",
)
"""Return the tracing context of the compilation on this thread, or None outside compilations."""


def _unchanged(function: _T, *_: object) -> _T:
    return function


_REGION_SKIPPED = "functions that torch.compile breaks at the entering of a region may run without the region"


def constant_to_dynamo(function: _T) -> _T:
    """Decorate a function that Dynamo calls while it traces, taking the result for a constant.

    As :func:`torch.compiler.assume_constant_result`, without importing Dynamo.
    """
    setattr(function, "_dynamo_marked_constant", True)
    return function


dynamo_disabled: Callable[[Any], Any] = torch_name(
    "torch._compile._disable_dynamo", _unchanged, "what a checkpoint recomputes may be compiled again"
)
_FrameExecStrategy: Any = torch_name("torch._C._dynamo.eval_frame._FrameExecStrategy", None, _REGION_SKIPPED)
_FrameAction: Any = torch_name("torch._C._dynamo.eval_frame._FrameAction", None, _REGION_SKIPPED)
_set_strategy: Any = torch_name("torch._C._dynamo.eval_frame.set_code_exec_strategy", None, _REGION_SKIPPED)


def disable_dynamo(func: _F) -> _F:
    """Make Dynamo skip the frames of `func` and its callees; when it traces a caller, it still inlines `func`.

    As ``torch.compiler.disable``, without its import of Dynamo. After a graph break, Dynamo compiles each function that
    is called by itself. Entering a region sets state outside of any graph: compiled by itself, it would fail or do
    nothing.
    """
    if not any(each is None for each in (_FrameExecStrategy, _FrameAction, _set_strategy)):
        _set_strategy(func.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return func


_NOT_IN_REGIONS = "torch.cond and other higher-order ops raise NotImplementedError in regions on most devices"

named_higher_order_ops: dict[str, Any] = torch_name("torch._ops._higher_order_ops", {}, _NOT_IN_REGIONS)
keys_that_higher_order_ops_skip: list[Any] = torch_name(
    "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", [], _NOT_IN_REGIONS
)

_NOT_SCRIPTED = "torch.jit.script refuses functions with regions of polycast"

_script_class_of: Callable[[type], Any] | None = torch_name("torch.jit._state._get_script_class", None, _NOT_SCRIPTED)
_compile_class: Callable[[type, Any], Any] | None = torch_name(
    "torch.jit._script._recursive_compile_class", None, _NOT_SCRIPTED
)
_no_source: Callable[[], Any] | None = torch_name("torch._sources.fake_range", None, _NOT_SCRIPTED)


def script_name(cls: type) -> str | None:
    """Return the name of a class in TorchScript, which compiles it at the first call; None if this torch cannot."""
    if _script_class_of is None or _compile_class is None or _no_source is None:
        return None
    compiled = _script_class_of(cls)
    if compiled is None:
        compiled = _compile_class(cls, _no_source())
    name: str = compiled.qualified_name()
    return name
