"""Attentions that autograd records, in a region with the recipe `Fastest`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polycast.plugin import NativeLibrary, Plan, choose_engine, disable_autocast, find_op, load_ops

from .cases import has_kernel
from .choose_way import dtype_of
from .recorded_ways import RecordedOperands, Ways
from .workloads import size_hint

OPS = NativeLibrary.of_ops("polycast_plugins.fastest.native")
_FUSED, _FUSED_BACKWARD = (f"aten::_scaled_dot_product_flash_attention_for_cpu{part}" for part in ("", "_backward"))
"""The ops that torch computes most attentions by, on the CPU."""


class RecordedAttention(NamedTuple):
    """An attention that autograd records.

    Attributes:
        op: by its name in the dispatcher.
        args: its arguments.
        is_fused: whether the backward is torch's fused kernel. Otherwise it computes the attention again.
    """

    op: str
    args: Sequence[Any]
    is_fused: bool

    @classmethod
    def of(cls, op: str, args: Sequence[Any], dtype: torch.dtype) -> "RecordedAttention | None":
        """Return a call as a recorded attention; None with dropout, which would differ in the backward."""
        _, _, _, _, dropout, *_ = args
        return None if dropout else cls(op, args, _is_fused(args, dtype))

    @property
    def _positions(self) -> list[int]:
        """The positions of the tensors among the arguments."""
        return [at for at, arg in enumerate(self.args) if isinstance(arg, torch.Tensor)]

    def operands(self, is_cached: bool, in_function: bool) -> RecordedOperands:
        """Return what the choice of ways depends on; see :meth:`Recorded.operands`."""
        query, key, value, *_ = self.args
        is_needed = in_function or any(self.args[at].requires_grad for at in self._positions)
        return RecordedOperands(
            size_hint(query.numel()),
            size_hint(key.numel()) + size_hint(value.numel()),
            query.dtype is torch.float32,
            key.dtype is torch.float32,
            is_weight=False,
            is_cached=False,
            first_needed=is_needed,
            second_needed=is_needed,
            is_recomputed=not self.is_fused,
        )

    def native_action(self, ways: Ways, dtype: torch.dtype) -> Plan.Action | None:
        """Return what the native engine does for calls like this one; None if no op in C++ computes them."""
        return op_action("attention", constants=_dtypes(ways, dtype)) if self.is_fused else None

    def compute(
        self, ways: Ways, dtype: torch.dtype, cast_weight: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Compute the attention, recorded as one autograd function; see :meth:`Recorded.compute`."""
        forward, backward = _dtypes(ways, dtype)
        return self._fused(forward, backward, dtype) if self.is_fused else self._recomputed(forward, backward, dtype)

    def _fused(self, forward: torch.dtype, backward: torch.dtype, fast: torch.dtype) -> torch.Tensor:
        query, key, value, mask, _, is_causal, scale, _ = self.args
        if mask is not None:
            mask = _to_save(mask, fast if fast in (forward, backward) else mask.dtype, fast)
        settings = AttentionSettings(forward, backward, is_causal, scale)
        result: torch.Tensor = FusedAttention.apply(settings, query, key, value, mask)  # type: ignore[no-untyped-call]
        return result

    def _recomputed(self, forward: torch.dtype, backward: torch.dtype, fast: torch.dtype) -> torch.Tensor:
        op, args, positions = self.op, self.args, self._positions
        others = [None if at in positions else arg for at, arg in enumerate(args)]
        # A mask of numbers is not rounded: it may have numbers that the fast dtype has not.
        saved = [args[at].to(fast) if at < 3 else _mask_to_save(args[at], fast) for at in positions]
        kernels = _enabled_kernels()

        def compute() -> torch.Tensor:
            result: torch.Tensor = Plan.in_dtype(op, args, forward).to(fast)
            return result

        def again(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            given = list(others)
            for at, tensor in zip(positions, tensors, strict=True):
                given[at] = tensor
            with nullcontext() if _enabled_kernels() == kernels else sdpa_kernel(kernels):
                result: torch.Tensor = Plan.in_dtype(op, given, backward)
                return result

        result: torch.Tensor = Recomputed.apply(compute, again, *saved)  # type: ignore[no-untyped-call]
        return result


def op_action(
    name: str, weight: int = 0, prepack_id: int = Plan.AS_IT_IS, constants: tuple[Any, ...] = ()
) -> Plan.Action | None:
    """Return the action that calls an op in native/ops.cpp; None if that cannot be compiled. See `Plan.Action`.

    Also None on an engine that keeps no actions, which would wait for a compiler in vain.
    """
    if not choose_engine().caches or not load_ops(OPS.package).available:
        return None
    return Plan.call_action(getattr(torch.ops.polycast_fastest, name).default, weight, prepack_id, constants)


def _dtypes(ways: Ways, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes to compute the forward and the backward in, given the fast dtype."""
    return dtype_of(ways.forward, dtype), dtype_of(ways.first, dtype)


def _is_fused(args: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return whether the operands have the fast dtype, and torch would compute the attention by its fused kernel."""
    query, key, value, mask, dropout, is_causal, scale, has_groups = args
    if Plan.is_traced() or dropout or any(each.dtype is not dtype or Plan.is_special(each) for each in args[:3]):
        return False
    if mask is not None and (
        mask.requires_grad or Plan.is_special(mask) or mask.dtype not in (torch.bool, *Plan.FLOATS)
    ):
        return False  # torch computes it by other ops, or raises
    choose = find_op("aten::_fused_sdp_choice")
    if choose is None or has_groups or any(find_op(each) is None for each in (_FUSED, _FUSED_BACKWARD)):
        return False
    if not has_kernel(_FUSED, query.device.type):
        return False
    choice: int = choose(query, key, value, mask, 0.0, is_causal, scale=scale)
    return choice == int(SDPBackend.FLASH_ATTENTION.value)


def _to_save(mask: torch.Tensor, dtype: torch.dtype, fast: torch.dtype) -> torch.Tensor:
    """Return the mask to save and to add: converted to a dtype, or 0 and -inf in the fast dtype for a boolean mask.

    Forward and backward must add the same numbers, so the mask is rounded to the fast dtype if either computes in it.
    """
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=fast).masked_fill_(~mask, -torch.inf)
    return _mask_to_save(mask.to(dtype), fast)


def _mask_to_save(mask: torch.Tensor, fast: torch.dtype) -> torch.Tensor:
    """Return a mask, or a copy where autograd cannot save it, or torch saves a converted one: it may change."""
    return mask.clone() if mask.dtype is not fast or mask.is_inference() else mask


def _enabled_kernels() -> list[SDPBackend]:
    """Return the kernels of attention that torch may choose."""
    enabled: Any = torch.backends.cuda
    kernels = {
        SDPBackend.FLASH_ATTENTION: enabled.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: enabled.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: enabled.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: enabled.cudnn_sdp_enabled(),
    }
    return [kernel for kernel, is_enabled in kernels.items() if is_enabled]


def _call(name: str, *args: Any, **named: Any) -> Any:
    op: Any = find_op(name)  # see _is_fused()
    return op(*args, **named)


class AttentionSettings(NamedTuple):
    """The dtypes to compute the forward and the backward of an attention in, and its arguments that are no tensors."""

    forward: torch.dtype
    backward: torch.dtype
    is_causal: bool
    scale: float | None


class FusedAttention(torch.autograd.Function):
    """Attention on operands in the fast dtype, by torch's fused kernels for the forward and the backward.

    Each of the two computes in the fast dtype or in float32. What is saved is what torch's op saves in the fast dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the attention."""
        ctx.set_materialize_grads(False)
        ctx.settings, dtype = settings, settings.forward
        with disable_autocast():
            output, sums = _call(
                _FUSED,
                *(each.to(dtype) for each in (query, key, value)),
                is_causal=settings.is_causal,
                attn_mask=None if mask is None else mask.to(dtype),
                scale=settings.scale,
            )
            result: torch.Tensor = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums, mask)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        """Return the gradients of the operands, in their dtype."""
        if gradient is None:
            return None, None, None, None, None
        *operands, result, sums, mask = ctx.saved_tensors
        settings, dtype = ctx.settings, ctx.settings.backward
        with disable_autocast():
            found = _call(
                _FUSED_BACKWARD,
                *(each.to(dtype) for each in (gradient, *operands, result)),
                sums,
                0.0,
                settings.is_causal,
                attn_mask=None if mask is None else mask.to(dtype),
                scale=settings.scale,
            )
            needed = ctx.needs_input_grad[1:4]
            return (
                None,
                *(each.to(result.dtype) if need else None for each, need in zip(found, needed, strict=True)),
                None,
            )


class Recomputed(torch.autograd.Function):
    """An op whose backward computes it again, in the fast dtype or in float32, as autograd records it."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[[], torch.Tensor],
        again: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        *saved: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the op.

        Args:
            forward: computes it.
            again: computes it from what is saved.
            saved: its tensors.
        """
        ctx.set_materialize_grads(False)
        ctx.again = again
        ctx.save_for_backward(*saved)
        with disable_autocast():
            return forward()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        """Return the gradients of what was saved."""
        needed = ctx.needs_input_grad[2:]
        if gradient is None:
            return (None, None, *(None for _ in needed))
        saved, is_recorded = ctx.saved_tensors, torch.is_grad_enabled()
        if is_recorded:  # by views: one operand may be computed from another, or be the same tensor
            saved = [each.view_as(each) if need else each for each, need in zip(saved, needed, strict=True)]
        else:
            saved = [each.detach().requires_grad_(need) for each, need in zip(saved, needed, strict=True)]
        with torch.enable_grad(), disable_autocast():
            result = ctx.again(saved)
        inputs = [each for each, need in zip(saved, needed, strict=True) if need]
        found = iter(torch.autograd.grad(result, inputs, gradient.to(result.dtype), create_graph=is_recorded))
        return (None, None, *(next(found) if need else None for need in needed))
