"""``explain``: what autocast does to an op, or to the modules of a model, without running it."""

import copy
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from polycast import Explanation, Policy, apply_policy, rules_of
from polycast.plugin import Recipe, dtype_name, events, explain_op, get_backend

from .calls import DispatchMode, ModelCall, device_of, in_this_thread, watched
from .compare import PolicyLike, enabled_region, wanted_recipe
from .results import ModelExplanation, ModuleExplanation
from .values import tensors_in

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef
    from torch._ops import OpOverload, OpOverloadPacket

_MOVES = ("aten::_to_copy", "aten::copy_", "aten::clone", "aten::detach", "aten::empty_like")
"""Ops that compute nothing."""
_PLAIN = torch.Tensor, nn.Parameter


@overload
def explain(
    subject: "str | OpOverload | OpOverloadPacket | CustomOpDef",
    /,
    *args: Any,
    device_type: str,
    policy: PolicyLike | None = None,
    recipe: Recipe | str | None = None,
    **kwargs: Any,
) -> Explanation: ...


@overload
def explain(
    subject: nn.Module,
    inputs: Any,
    /,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    policy: PolicyLike | None = None,
    recipe: Recipe | str | None = None,
) -> ModelExplanation: ...


def explain(
    subject: Any,
    /,
    *args: Any,
    device_type: str | None = None,
    policy: PolicyLike | None = None,
    recipe: Recipe | str | None = None,
    **kwargs: Any,
) -> Explanation | ModelExplanation:
    """Explain what autocast does to an op, or to the modules of a model. Nothing is computed.

    For an op, ``explain(op, *args, device_type, policy=None, recipe=None, **kwargs)``: what autocast does to it in this
    thread's region for the device, and which rule decides it. `args` and `kwargs` are arguments of the op, to explain
    the dtype of each tensor; they may be fake tensors, and a tensor on ``meta`` counts as on the device. Without any,
    only the rule is explained, for each overload of the name.

    For a model, ``explain(model, inputs, *, device_type=None, dtype=None, policy=None, recipe=None)``: for each
    module, its rule (:func:`apply_policy`), and the dtypes of its weights, of what it computes in, and of its output,
    in a region inside this thread's. A copy of the model runs on fake tensors, under the current grad mode; compiled
    modules run eagerly, and torch's transformer layers without their fast path. `inputs` are a tensor, a tuple of
    arguments, or a dict of keyword arguments; the model and its inputs may be on ``meta``, with a `device_type`.

    Args:
        subject: an op, itself or by a name as in a :class:`Policy`; or a model.
        device_type: the device whose autocast to explain; for a model, by default the model's.
        dtype: the fast dtype, by default that of this thread's region, or the device's.
        policy: explain a region with this ``policy=``, inside this thread's region; for a model, it may have rules for
            modules.
        recipe: explain a region with this ``recipe=``.

    Returns:
        An :class:`Explanation` of the op, or a :class:`~polycast_plugins.precision.ModelExplanation`; ``print`` shows
        either.

    Raises:
        TypeError: the op does not take the arguments; `subject` is neither an op nor a model; `inputs` are of another
            type; the `device_type` of an op is missing; or the model is a ScriptModule, or cannot be copied.
        ValueError: torch has no such op, with the nearest names; `policy` or `recipe` is invalid; or the model is on
            ``meta``, without a `device_type`, or has lazy modules that were not called.
        RuntimeError: the model's forward depends on values of tensors; or the region cannot run enabled, or not with
            the recipe.
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.

    Example:
        >>> import torch, polycast
        >>> with polycast.autocast("cpu"):
        ...     print(polycast.explain("mm", torch.ones(2, 2), torch.ones(2, 2).bfloat16(), device_type="cpu"))
        aten::mm on cpu, a region of bfloat16
        lower_precision_fp (backend's table): its inputs are cast to bfloat16
          self: float32 -> bfloat16
          mat2: bfloat16, unchanged
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> for module in polycast.explain(model, torch.ones(1, 4)).modules:
        ...     print(module.name, module.kind, *module.compute, *module.output)
        0 Linear bfloat16 torch.bfloat16
        1 Tanh bfloat16 torch.bfloat16
    """
    if isinstance(subject, nn.Module):
        if len(args) != 1 or kwargs.keys() - {"dtype"}:
            raise TypeError(
                "explain() of a model takes explain(model, inputs, *, device_type, dtype, policy, recipe); got "
                f"{len(args)} positional arguments after the model, and the keywords {list(kwargs)}"
            )
        return _explain_model(subject, *args, device_type, kwargs.get("dtype"), policy, recipe)
    if device_type is None:
        raise TypeError("explain() of an op needs the device whose autocast to explain, as device_type='cpu'")
    return explain_op(subject, device_type, args, kwargs, policy, recipe)


def _explain_model(
    model: nn.Module,
    inputs: Any,
    device_type: str | None,
    dtype: torch.dtype | None,
    policy: PolicyLike | None,
    recipe: Recipe | str | None,
) -> ModelExplanation:
    from torch._subclasses import FakeTensorMode

    call, given, wanted = ModelCall.of(model, inputs), Policy.of(policy or {}), wanted_recipe(recipe)
    arguments = [tensor for _, tensor in tensors_in((call.args, call.kwargs))]
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "the model is a ScriptModule, whose calls of modules are not visible to Python. Explain the model that it "
            "was scripted from."
        )
    if any(map(is_lazy, chain(model.parameters(), model.buffers()))):
        raise ValueError("the model has lazy modules, whose parameters have no shapes yet: call it once before")
    device = get_backend(device_of(model, [call]) if device_type is None else device_type).device_type
    if dtype is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    region = enabled_region(device, dtype, given.without_modules(), wanted)
    modules = given.for_device(region.device).modules
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faking = _Faking(mode, device)
    held = [tensor for _, tensor in tensors_in([vars(module) for module in model.modules()])]
    fakes = {id(each): faking.fake(each) for each in (*held, *arguments)}
    copied, args, kwargs = _copied((model, call.args, dict(call.kwargs)), fakes, faking)
    with apply_policy(copied, Policy(modules=modules)):
        calls = _Calls(copied, faking)
        with ExitStack() as stack:
            stack.enter_context(region)
            stack.enter_context(watched(copied, in_this_thread(calls)))
            events.recipe_call.add(calls.note_declined)
            stack.callback(events.recipe_call.remove, calls.note_declined)
            events.matched_call.add(calls.note_match, threading.get_ident())
            stack.callback(events.matched_call.remove, calls.note_match)
            stack.enter_context(mode)
            stack.enter_context(calls)
            _run(copied, args, kwargs)
    return ModelExplanation(region.device, region.fast_dtype, wanted, tuple(calls.explanations()))


class _Faking(TorchFunctionMode):
    """Makes fake tensors, also in place of those that deepcopy copies, or refuses because they are of a graph."""

    def __init__(self, mode: Any, device_type: str) -> None:
        super().__init__()
        self._mode, self._device = mode, torch.device(device_type)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor of a tensor; of one on meta, one on the device.

        torch's conversion reads the storage. After that a WeightCache could miss writes to a weight, and drops its
        casts.
        """
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
            converted: torch.Tensor = self._mode.from_tensor(tensor)
            if not converted.is_meta:
                return converted
        device = self._device if tensor.is_meta else tensor.device
        with self._mode, torch.no_grad():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        made.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf:
            return made
        with self._mode, torch.enable_grad():
            return made.clone()  # which may be written in place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.fake(args[0])
        return func(*args, **(kwargs or {}))


def _copied(value: tuple[Any, ...], fakes: dict[int, torch.Tensor], faking: _Faking) -> tuple[Any, ...]:
    """Return a copy of a model and its arguments, with fake tensors by the id of the original."""
    try:
        with faking:
            return copy.deepcopy(value, dict[int, Any](fakes))
    except Exception as error:
        raise TypeError(f"explain runs a copy of the model, which cannot be copied: {error}") from error


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        model(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise RuntimeError(
            f"the forward of {type(model).__name__} depends on values of tensors ({error}), which explain does not "
            "compute: run the model in a region under polycast.observe(model)"
        ) from error


class _Calls(DispatchMode):  # type: ignore[misc]
    """Records the calls of a model's modules, and the ops in each; a watcher of modules and a mode below autocast."""

    def __init__(self, model: nn.Module, faking: _Faking) -> None:
        super().__init__()
        self._faking = faking
        self._names = {module: name for name, module in model.named_modules()}
        self._rules = rules_of(model)
        self._open: list[_Module] = []
        self._found: dict[nn.Module, _Module] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle a call of a module."""
        found = self._found.get(module)
        if found is None:
            name = self._names.get(module, "")
            around = self._open[-1].rule if self._open else ""
            found = self._found[module] = _Module(name, module, self._rules.get(name, around))
        found.calls += 1
        self._open.append(found)

    def leave(self, module: nn.Module, output: Any) -> None:
        """Handle the return of a module."""
        while self._open.pop().module is not module:  # a call inside it raised, and its caller went on
            pass
        found = self._found[module]
        found.output.update(dict.fromkeys(_floating(tensor for _, tensor in tensors_in(output))))

    def note_declined(self, _device: str, _recipe: str, op: str, reason: str | None, _package: str) -> None:
        """Note that a recipe declines an op, and why."""
        if self._open and reason is not None:
            self._open[-1].declined[op] = reason

    def note_match(self, _device: str, op: str) -> None:
        """Note that MATCH casts inputs of an op."""
        if self._open:
            self._open[-1].matched[op] += 1

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._open and (what := _computes_in(op, args)) is not None:
            self._open[-1].compute[what] += 1
        args, kwargs = tree_map_only(_is_plain, self._faking.fake, (args, kwargs or {}))
        return op(*args, **kwargs)

    def explanations(self) -> Iterator[ModuleExplanation]:
        """Yield the explanation of each module that ran ops, or has a rule of its own."""
        for each in self._found.values():
            if each.compute or each.declined or each.name in self._rules:
                yield each.explanation()


class _Module:
    """Counts and dtypes of a module's calls."""

    def __init__(self, name: str, module: nn.Module, rule: str) -> None:
        self.name, self.module, self.rule = name, module, rule
        self.calls = 0
        self.compute: Counter[str] = Counter()
        self.output: dict[torch.dtype, None] = {}
        self.declined: dict[str, str] = {}
        self.matched: Counter[str] = Counter()

    def explanation(self) -> ModuleExplanation:
        weights = tuple(dict.fromkeys(_floating(self.module.parameters(recurse=False))))
        compute = dict(self.compute.most_common())
        kind = type(self.module).__name__
        return ModuleExplanation(
            *(self.name, kind, self.calls, self.rule, weights, compute, tuple(self.output)),
            *(self.declined, dict(self.matched)),
        )


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def _floating(tensors: Iterable[torch.Tensor]) -> Iterator[torch.dtype]:
    return (each.dtype for each in tensors if each.is_floating_point())


def _computes_in(op: Any, args: tuple[Any, ...]) -> str | None:
    """Return the dtype or the recipe that an op computes in; None if it computes nothing on floating-point numbers."""
    names = [argument.name for argument in op._schema.arguments]
    if op.namespace == "polycast":
        return Recipe.of_text(args[names.index("recipe")]).short if "recipe" in names else None
    if op.namespace == "prim" or op.is_view or op._schema.name in _MOVES:
        return None
    dtype = next(_floating(tensor for _, tensor in tensors_in(args)), None)
    return None if dtype is None else dtype_name(dtype)
