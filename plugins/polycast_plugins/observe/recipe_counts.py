"""Count what recipes compute in a run: the calls, and the share of the operations in matmuls."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .records import LowBit


@dataclass(frozen=True)
class MatmulRows:
    """Matmuls whose activations have the same number of rows.

    Attributes:
        op, rows: as in a `Measurement` of a :class:`polycast.DeviceProfile`. If there are many numbers of rows, the
            others are rounded up to powers of two.
        calls, flops: as in a :class:`Matmul`.
        estimates: the seconds of these calls by the profile of the device, by way, such as ``"float32"`` and
            ``"bfloat16"``; empty if the device has no profile.
    """

    op: str
    rows: int
    calls: int = 0
    flops: float = 0.0
    estimates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Matmul:
    """Calls of an op that multiplies matrices.

    Attributes:
        op, phase: the op: mm, addmm, bmm, linear, a convolution, attention, a recurrent layer. If one calls another,
            the outermost is counted. An op that is none of these, such as an einsum outside of autocast, has the
            operations of the ops that it calls.
        module: the module that called it; None: none of the model's.
        device: the device whose autocast it reached; empty: none.
        recipe: the active recipe, ``"int8"``; empty: none.
        declined: why the recipe did not compute it; empty: it did, or there was none.
        dtype: the dtype that it computed in, or with a recipe returned; empty: unknown.
        calls: the number of calls.
        seconds: their time, casts included; 0.0 without ``timing=True``.
        rows: the calls by the number of rows of their activations, as far as known.
        flops: the floating-point operations by the sizes of the tensors, as in ``torch.utils.flop_counter``: two for
            each product of two elements. Masks save none, and the dtype does not matter.
    """

    op: str
    phase: str
    module: str | None
    device: str
    recipe: str = ""
    declined: str = ""
    dtype: str = ""
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    rows: tuple[MatmulRows, ...] = ()


FUSED = dict.fromkeys(
    ("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"),
    "torch's fused path does not ask recipes (torch.backends.mha.set_fastpath_enabled(False) avoids it)",
)
"""The fused ops of torch's attention modules in eval mode, and why no recipe computes them."""

_MIN_SHARE = 0.01
_MAX_LINES = 10


def is_by_recipe(matmul: Matmul) -> bool:
    """Return whether a recipe computed a matmul."""
    return bool(matmul.recipe) and not matmul.declined


def recipe_share(matmuls: Sequence[Matmul]) -> float | None:
    """Return the share of the operations that recipes computed; None without a recipe."""
    total = sum(each.flops for each in matmuls)
    if total <= 0 or not any(each.recipe for each in matmuls):
        return None
    return sum(each.flops for each in filter(is_by_recipe, matmuls)) / total


def matmul_lines(matmuls: Sequence[Matmul]) -> Iterator[str]:
    """Yield lines of text: the share that recipes computed, and the large matmuls that they did not."""
    if recipe_share(matmuls) is None:
        return
    total = sum(each.flops for each in matmuls)
    computed = list(filter(is_by_recipe, matmuls))
    by_recipe = {each.recipe: 0.0 for each in computed or matmuls if each.recipe}
    for each in computed:
        by_recipe[each.recipe] += each.flops
    shares = ", ".join(f"{recipe}: {flops / total:.0%}" for recipe, flops in by_recipe.items())
    yield f"{shares} of the {_flops(total)} in matmuls"
    others = list(_others(matmuls))
    large = [(flops, text) for flops, text in others if flops >= _MIN_SHARE * total][:_MAX_LINES]
    for flops, text in large:
        yield f"{flops / total:.0%} not: {text}"
    rest = sum(flops for flops, _ in others) - sum(flops for flops, _ in large)
    if len(large) < len(others) and rest > 0:
        count = len(others) - len(large)
        yield f"{rest / total:.1%} not: {count} more, in Observation.matmuls"


def _others(matmuls: Iterable[Matmul]) -> Iterator[tuple[float, str]]:
    """Yield (operations, text) of what recipes did not compute, by op and reason, the largest first."""
    groups: dict[tuple[str, str, str], list[Matmul]] = {}
    for each in matmuls:
        if not is_by_recipe(each):
            reason = each.declined or ("no recipe is active" if each.device else "it runs outside of autocast")
            groups.setdefault((each.op, each.phase, reason), []).append(each)
    for (op, phase, reason), group in sorted(groups.items(), key=lambda item: -sum(each.flops for each in item[1])):
        yield sum(each.flops for each in group), f"{_where(op, phase, group)}: {reason}"


def _where(op: str, phase: str, group: Sequence[Matmul]) -> str:
    by_module: dict[str, float] = {}
    for each in group:
        if each.module is not None:
            by_module[each.module] = by_module.get(each.module, 0.0) + each.flops
    text = op.removeprefix("aten::") + (" (backward)" if phase == "backward" else "")
    if not by_module:
        return text
    largest = max(by_module, key=lambda module: by_module[module])
    others = len(by_module) - 1
    return f"{text} in {largest or 'the model'}" + (f" and {others} more module{'s' * (others > 1)}" if others else "")


def _flops(number: float) -> str:
    units = iter(("", "k", "M", "G", "T", "P"))
    unit = next(units)
    while number >= 1000 and unit != "P":
        number, unit = number / 1000, next(units)
    return f"{number:.3g} {unit}FLOPs"


class RecipeCounts:
    """Counts of calls by thread, so that threads need no lock."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str, str, str, str, str], int] = {}

    def note(self, device_type: str, recipe: str, op: str, reason: str | None, package: str) -> None:
        """Count a call."""
        key = threading.get_ident(), device_type, recipe, op, reason or "", package
        self._counts[key] = self._counts.get(key, 0) + 1

    def records(self) -> tuple[LowBit, ...]:
        """Return the counts, the largest first."""
        total: Counter[tuple[str, str, str, str, str]] = Counter()
        for (_, *key), calls in self._counts.copy().items():
            device, recipe, op, reason, package = key
            total[device, recipe, op, reason, package] += calls
        return tuple(LowBit(*key[:4], calls=calls, package=key[4]) for key, calls in total.most_common())
