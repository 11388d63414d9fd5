"""Compute by parts what torch computes in one op, in regions whose recipe computes the parts.

The one op is out of reach for kernels of recipes: a fused attention layer; an LSTM of oneDNN, which is an op for each
layer; and a product of many experts, for which autocast has no policy.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from polycast.plugin import Patch, Plan, Recipe, disable_dynamo

from .low_bit_recipes import FEATURES

_HOST = "cpu"
_LINEAR, _FUSED = "aten::linear", "aten::_native_multi_head_attention"
_LARGE = 2**20
"""The elements of a weight from which on an LSTM by steps is faster in int8 than oneDNN's in the fast dtype. One step
always is: oneDNN reorders the weights at each call."""


def _recipes_for(op: str) -> dict[str, Recipe]:
    """Return, by device, the recipes of this thread's regions that name these changes to torch and compute an op."""
    return {device: recipe for device, recipe in Plan.recipes_for(op).items() if {*FEATURES} <= {*recipe.features}}


def _computes(op: str, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a recipe of lower precision computes an op with each of the weights, in inference on the host."""
    if torch.compiler.is_compiling():
        return False
    recipe = _recipes_for(op).get(_HOST)
    if recipe is None or not recipe.needs_kernels or any(each.numel() < recipe.min_size for each in weights):
        return False
    tensors = (*weights, *inputs)
    dtypes = torch.float32, torch.get_autocast_dtype(_HOST)
    if any(Plan.is_special(each) or each.device.type != _HOST or each.dtype not in dtypes for each in tensors):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return False
    return not (Plan.in_function() or Plan.is_intercepted())


def disable_fused_attention(patch: Patch) -> None:
    """Disable the fused path of torch's attention modules in regions whose recipe computes linears.

    In eval mode, nn.MultiheadAttention and nn.TransformerEncoder call one fused op. On cuda, torch disables it under
    autocast; on other devices it does not. torch computes nested tensors only by the fused op, so for these it stays
    enabled.
    """
    from torch.backends import mha

    torchs = vars(mha)["get_fastpath_enabled"]
    if torchs() is not mha._is_fastpath_enabled:
        raise NotImplementedError("get_fastpath_enabled does not return _is_fastpath_enabled")

    # It does not call torch's: Dynamo has a rule for the function by this name, and so would have none for torch's.
    def get_fastpath_enabled() -> bool:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return mha._is_fastpath_enabled and (not _recipe_computes_linears() or _is_for_nested_tensors())
        return True

    patch.replace(mha, "get_fastpath_enabled", get_fastpath_enabled)


def _recipe_computes_linears() -> bool:
    """Return whether this thread is in an enabled region whose recipe computes linears, and not the fused op."""
    return bool(_recipes_for(_LINEAR).keys() - _recipes_for(_FUSED).keys())


def _is_for_nested_tensors() -> bool:
    """Return whether the forward that asks for the fused path was given a nested tensor."""
    given = sys._getframe(2).f_locals.values()
    return any(isinstance(each, torch.Tensor) and each.is_nested for each in given)


for _function in (_recipe_computes_linears, _is_for_nested_tensors):
    # As torch.compiler.assume_constant_result, without importing Dynamo: compiled code is guarded on the override.
    setattr(_function, "_dynamo_marked_constant", True)


def forget_rules_of_dynamo() -> None:
    """Clear Dynamo's rules by function, which it has looked up by name, perhaps while a function was replaced."""
    trace_rules = sys.modules.get("torch._dynamo.trace_rules")
    clear = getattr(getattr(trace_rules, "get_torch_obj_rule_map", None), "cache_clear", None)
    if clear is not None:
        clear()


def compute_lstm_by_step(patch: Patch) -> None:
    """Compute nn.LSTM by its linears, one for the inputs of a layer and one for each step."""
    torchs = torch._VF.lstm

    @disable_dynamo  # which leaves torch's modules to eager code, and would compile this function, which they call
    def lstm(*args: Any) -> Any:
        return _lstm(*args) if _can_be_by_step(*args) else torchs(*args)

    # A script calls the op, which is found by the address of the function.
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    patch.replace_item(table, id(lstm), "aten::lstm")
    patch.replace(torch._VF, "lstm", lstm)


def _can_be_by_step(*args: Any) -> bool:
    """Return whether a recipe computes the linears of an LSTM over padded sequences, and pays."""
    if len(args) != 9 or isinstance(args[1], torch.Tensor):  # packed sequences
        return False
    x, states, parameters, _, _, dropout, train, _, batch_first = args
    weights = [each for each in parameters if each.dim() == 2]
    has_projections = states[0].shape[-1] != states[1].shape[-1]
    if x.numel() == 0 or has_projections or (train and dropout):
        return False
    length = x.shape[1 if batch_first else 0]
    if length > 1 and any(each.numel() < _LARGE for each in weights):
        return False
    return _computes("aten::linear", weights, (x, *states))


def _lstm(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the op returns: the outputs of the last layer, and the last states of all; in the fast dtype."""
    rows = x.transpose(0, 1) if batch_first else x
    directions, each = 1 + bidirectional, 2 + 2 * has_biases
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = parameters[number * each : (number + 1) * each]
            hidden, cell = (state[number].float() for state in states)
            steps, *ends = _steps(rows.flip(0) if direction else rows, hidden, cell, *weights)
            outputs.append(steps.flip(0) if direction else steps)
            last.append((ends[0], ends[1]))
        rows = torch.cat(outputs, -1) if bidirectional else outputs[0]
    dtype = torch.get_autocast_dtype(x.device.type)
    hidden, cell = (torch.stack(of_layers).to(dtype) for of_layers in zip(*last, strict=True))
    return (rows.transpose(0, 1) if batch_first else rows).to(dtype), hidden, cell


def _steps(
    x: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    from_input: torch.Tensor,
    from_hidden: torch.Tensor,
    *biases: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs of one direction of a layer, [T, B, H], and its last states, [B, H], in float32."""
    linear = torch.nn.functional.linear
    of_input, of_hidden = biases or (None, None)
    outputs = []
    for step in linear(x, from_input, of_input).float().unbind():
        gates = step + linear(hidden, from_hidden, of_hidden)
        entering, kept, _, leaving = gates.sigmoid().chunk(4, -1)
        cell = torch.addcmul(entering * gates.chunk(4, -1)[2].tanh(), kept, cell)
        hidden = leaving * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs), hidden, cell


def compute_experts_one_by_one(patch: Patch) -> None:
    """Compute F.grouped_mm by a product for each expert that has rows."""
    from torch.nn import functional

    torchs = functional.grouped_mm

    def grouped_mm(
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if bias is None and out_dtype is None and offs is not None and _are_experts(mat_a, mat_b, offs):
            return _one_by_one(mat_a, mat_b, offs)
        return torchs(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)

    patch.replace(functional, "grouped_mm", grouped_mm)


def _are_experts(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> bool:
    """Return whether a recipe computes the products of rows and experts."""
    if x.dim() != 2 or weights.dim() != 3 or x.shape[1] != weights.shape[1] or ends.shape != weights.shape[:1]:
        return False
    return len(ends) > 0 and ends.device.type == _HOST and _computes("aten::mm", [weights[0]], (x, weights))


def _one_by_one(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the products of the rows before each end and an expert, in the fast dtype; rows after the last are 0."""
    out = x.new_zeros((x.shape[0], weights.shape[2]), dtype=torch.get_autocast_dtype(x.device.type))
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            out[begin:end] = torch.mm(x[begin:end], weights[expert])
        begin = end
    return out
