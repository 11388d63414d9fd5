"""The calls of a model and of its modules: inputs as users pass them, hooks that watch calls, and what calls raise."""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from polycast.plugin import dtype_name, torch_name

from .values import copied, tensors_in

DispatchMode: Any = torch_name(
    "torch.utils._python_dispatch.TorchDispatchMode",
    nullcontext,
    "polycast.tune(over='ops') chooses from the ops of the backend's table only",
)
CallKey = tuple[tuple[str, int], ...]
"""Identifies a call: for each call around it and itself the name of the module, and its number within the caller."""
COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that was compiled in place: what is called instead of its forward."""


@dataclass(frozen=True)
class ModelCall:
    """The arguments of a call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, model: object, inputs: object) -> "ModelCall":
        """Return a call with a tensor, a tuple of arguments or a dict of keyword arguments."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(inputs, torch.Tensor):
            return cls((inputs,), {})
        if isinstance(inputs, tuple):
            return cls(inputs, {})
        if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
            return cls((), dict(inputs))
        raise TypeError(
            "inputs must be a tensor, a tuple of arguments or a dict of keyword arguments for the model's forward; got "
            f"{type(inputs).__name__}. Put a single argument of another type into a tuple: (argument,)."
        )

    def run(self, model: torch.nn.Module) -> Any:
        """Call the model with copies of the arguments, because it may write to them."""
        args, kwargs = copied((self.args, dict(self.kwargs)), model)
        try:
            return model(*args, **kwargs)
        except TypeError as error:
            self._check_fits(model, error)
            raise

    def _check_fits(self, model: torch.nn.Module, cause: TypeError) -> None:
        """Raise TypeError if the signature of the model's forward takes other arguments."""
        try:
            signature = inspect.signature(model.forward)
        except (TypeError, ValueError):  # it has none
            return
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise TypeError(
                f"{type(model).__name__}.forward{signature} does not take these inputs, {self}: {error}. A tuple has "
                "the arguments of one call. If a loader also returns targets, pass what the model takes: "
                "(x for x, _ in loader)."
            ) from cause

    def __str__(self) -> str:
        """Return the tensors as text: ``float32 (360, 1, 8, 8)``, ``input_ids: int64 (1, 16)``."""
        named = [*tensors_in(list(self.args)), *tensors_in(self.kwargs)]
        parts = []
        for name, tensor in named:
            what = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            parts.append(what if name in ("", "[0]") and len(self.args) == 1 else f"{name}: {what}")
        return ", ".join(parts) or "no tensors"

    def structure(self) -> dict[str, str]:
        """Return by path the dtype of each tensor."""
        named = [*tensors_in(list(self.args), "argument "), *tensors_in(self.kwargs)]
        return {name: dtype_name(tensor.dtype) for name, tensor in named}


Calls: TypeAlias = tuple[ModelCall, ...]


def calls_of(model: object, data: object, what: str = "data", like: Calls = ()) -> Calls:
    """Return the calls of a model with one call's inputs, or with each batch of an iterable.

    A batch is a tensor, a tuple or list of arguments, or a dict of keyword arguments. The iterable is read once. All
    must have the structure of the first, or of other calls that they are `like`. Messages call the argument `what`.
    """
    first, name = (like[0], "data") if like else (None, "batch 0")
    if isinstance(data, (torch.Tensor, tuple, Mapping)) or not isinstance(data, Iterable) or isinstance(data, str):
        call = ModelCall.of(model, data)
        _check_structure(first, call, what, name)
        return (call,)
    calls: list[ModelCall] = []
    for number, batch in enumerate(data):
        try:
            call = ModelCall.of(model, tuple(batch) if isinstance(batch, list) else batch)
        except TypeError as error:
            raise TypeError(f"batch {number} of {what}: {error}") from None
        first = first or call
        _check_structure(first, call, f"batch {number} of {what}", name)
        calls.append(call)
    if not calls:
        raise ValueError(f"{what} has no batches: pass one call's inputs, or an iterable with at least one batch")
    return tuple(calls)


def tensors_of(model: torch.nn.Module, calls: Iterable[ModelCall]) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model, and the tensors in its inputs."""
    inputs = (tensor for call in calls for _, tensor in tensors_in((call.args, call.kwargs)))
    return [*model.parameters(), *model.buffers(), *inputs]


def device_of(model: torch.nn.Module, calls: Iterable[ModelCall]) -> str:
    """Return the device type of a model's first tensor, or else of its inputs' first."""
    device = next(iter(tensors_of(model, calls)), torch.empty(0)).device.type
    if device == "meta":
        raise ValueError("the model is on meta: name the device that it is meant for, as device_type='cpu'")
    return device


def _check_structure(first: ModelCall | None, call: ModelCall, what: str, than: str) -> None:
    """Raise ValueError if a call has another structure than the first."""
    if first is None:
        return
    before, now = first.structure(), call.structure()
    for name in {**before, **now}:
        expected, got = before.get(name, "no tensor"), now.get(name, "no tensor")
        if expected != got:
            raise ValueError(
                f"{what} has another structure than {than}: {name} is {got}, and {expected} in {than}. Give all "
                "batches the same arguments in the same dtypes; sizes may differ."
            )


def text_of(calls: Calls) -> str:
    """Return the tensors of the first call as text, and the number of other calls."""
    more = len(calls) - 1
    return str(calls[0]) + (f" and {more} more {'batch' if more == 1 else 'batches'}" if more else "")


class Watcher(Protocol):
    """Is notified of the calls of modules."""

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call; return what a forward pre-hook may return."""

    def leave(self, module: torch.nn.Module, output: Any) -> Any:
        """Handle the return of a call; return what a forward hook may return."""


def set_stance(stance: str) -> AbstractContextManager[object]:
    """Set how compiled code runs, and return a context manager that restores it at its end."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes a second
        return nullcontext()
    set_to: AbstractContextManager[object] = torch.compiler.set_stance(stance)
    return set_to


def run_eagerly() -> AbstractContextManager[object]:
    """Return a context manager in which compiled code runs eagerly."""
    return set_stance("force_eager")


@contextmanager
def watched(model: torch.nn.Module, watcher_here: Callable[[], Watcher | None]) -> Iterator[None]:
    """Notify the watcher of the current thread, if it has one, of each call of a module, outside of all other hooks.

    Compiled modules run eagerly in the block, so that their modules are called one by one.
    """
    with run_eagerly(), watched_modules(model.modules(), watcher_here):
        yield


@contextmanager
def watched_modules(modules: Iterable[torch.nn.Module], watcher_here: Callable[[], Watcher | None]) -> Iterator[None]:
    """Notify the watcher of the current thread, if it has one, of each call of some modules.

    A module that was compiled in place, whose hooks are part of the compiled code, is watched around that code.
    """

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # nothing in compiled code is watched
            return None
        watcher = watcher_here()
        return None if watcher is None else watcher.enter(module, args, kwargs)

    def leave(module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        watcher = watcher_here()
        return None if watcher is None else watcher.leave(module, output)

    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; counts as a part of its caller
                continue
            compiled = vars(module).get(COMPILED_CALL)
            if compiled is not None:
                vars(module)[COMPILED_CALL] = _Around(module, compiled, enter, leave)
                stack.callback(vars(module).__setitem__, COMPILED_CALL, compiled)
                continue
            first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(first.remove)
            last = module.register_forward_hook(leave, with_kwargs=True)
            stack.callback(last.remove)
        yield


class _Around:
    """The compiled call of a module, with a notification before and after it."""

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any], enter: Any, leave: Any) -> None:
        self._module, self._compiled, self._enter, self._leave = module, compiled, enter, leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._enter(self._module, args, kwargs) or (args, kwargs)
        output = self._compiled(*args, **kwargs)
        other = self._leave(self._module, args, kwargs, output)
        return output if other is None else other


def in_this_thread(watcher: Watcher) -> Callable[[], Watcher | None]:
    """Return a function that returns the watcher in this thread, and None in others."""
    thread = threading.get_ident()
    return lambda: watcher if threading.get_ident() == thread else None


class OpenCall:
    """A call of a module that has not returned yet; one without a module is around all others."""

    def __init__(self, key: CallKey, module: torch.nn.Module | None) -> None:
        self.key, self.module = key, module
        self._counts: dict[str, int] = {}

    def key_inside(self, name: str) -> CallKey:
        """Return the key of the next call of a module inside this one."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        return (*self.key, (name, count))


def innermost_common(one: CallKey, two: CallKey) -> CallKey:
    """Return the key of the innermost call around both, which may be one of them."""
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]


def may_come_from_policy(error: Exception) -> bool:
    """Return whether a policy may have caused an exception.

    False for running out of memory, and for timeouts, which the user's signal handler may have raised.
    """
    return not isinstance(error, (torch.OutOfMemoryError, MemoryError, TimeoutError))


def short_text(error: BaseException) -> str:
    """Return the first line of an exception's text, or the name of its class if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
