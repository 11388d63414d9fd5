"""The share of the operations in matmuls that recipes computed, and the reasons for the rest."""

from collections.abc import Iterable, Iterator, Sequence

from .matmul_records import Matmul

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
