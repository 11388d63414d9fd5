"""Findings: what in a run costs time or accuracy, where, how much, and what to do about it."""

from collections.abc import Callable, Iterator

from ...engine.low_bit_plan import RECORDS
from .facts import Facts
from .records import Chain, Finding, Region
from .units import size as _bytes

_Finder = Callable[[Facts], Iterator[Finding]]


def findings_of(facts: Facts) -> tuple[Finding, ...]:
    """Return what is found in a run, in the order of the finders below."""
    return tuple(finding for finder in _FINDERS for finding in finder(facts))


def _nonfinite(facts: Facts) -> Iterator[Finding]:
    seen = facts.nonfinite
    if seen is not None:
        where = _module(seen.module)
        called = f" It was called at {seen.stack[-1]}." if seen.stack else ""
        yield Finding(
            "nonfinite",
            where,
            f"{seen.op} was the first op to turn finite inputs into {seen.what} ({seen.dtype}, {seen.phase}); "
            f"{_times(seen.count)} in all.{called}",
            'Keep the op in float32 with a policy, such as policy={"' + _short(seen.op) + '": "fp32"}; in float16 '
            "scale the loss (polycast.grad_scaler), or use bfloat16.",
            module=seen.module,
            ops=(seen.op,),
            count=seen.count,
        )


def _weights_cast_again(facts: Facts) -> Iterator[Finding]:
    by_module: dict[str | None, int] = {}
    count = size = 0
    for cast in facts.casts:
        if cast.recasts > 0:
            by_module[cast.module] = by_module.get(cast.module, 0) + cast.recast_bytes
            count, size = count + cast.recasts, size + cast.recast_bytes
    if count:
        most = max(by_module, key=lambda module: by_module[module])
        others = len(by_module) - 1
        rate = size / facts.run.seconds if facts.run.seconds > 0 else 0.0
        yield Finding(
            "weights_cast_again",
            _module(most) + (f" and {others} other module{'s' * (others > 1)}" if others else ""),
            f"weights were cast again {_times(count)} that nothing had written since: {_bytes(size)}, "
            f"{_bytes(rate)} a second.",
            "Give the region a cache that outlives it: polycast.autocast(..., cache=polycast.WeightCache()).",
            module=most,
            count=count,
            bytes=size,
            bytes_per_second=rate,
        )


def _recipe_in_training(facts: Facts) -> Iterator[Finding]:
    for recipe in dict.fromkeys(record.recipe for record in facts.low_bit):
        refused = [each for each in facts.low_bit if each.recipe == recipe and each.declined == RECORDS]
        count = sum(each.calls for each in refused)
        if count > 0:
            yield Finding(
                "recipe_in_training",
                refused[0].device,
                f"ops that the recipe {recipe} is for ran in the fast dtype {_times(count)}, because {RECORDS}.",
                "Run inference under torch.no_grad() or torch.inference_mode().",
                ops=tuple(dict.fromkeys(each.op for each in refused)),
                count=count,
            )


def _chains(facts: Facts) -> Iterator[Finding]:
    for chain in facts.chains:
        if chain.count > 0 and chain.kind in _CHAINS:  # or a later version wrote it
            what, remedy = _CHAINS[chain.kind](chain)
            yield Finding(
                chain.kind,
                _module(chain.module),
                what,
                remedy,
                module=chain.module,
                ops=chain.ops,
                count=chain.count,
                bytes=chain.bytes,
                bytes_per_second=chain.bytes / facts.run.seconds if facts.run.seconds > 0 else 0.0,
            )


def _round_trip(chain: Chain) -> tuple[str, str]:
    down, up = chain.ops
    return (
        f"an activation goes to {chain.dtype} for {down} and back to float32 for {up}, {_times(chain.count)}: "
        f"{_bytes(chain.bytes)} cast.",
        f'Have both compute in one dtype: policy={{"{_short(down)}": "fp32"}}, or {{"{_short(up)}": '
        '"lower_precision_fp"}.',
    )


def _float32_by_one_input(chain: Chain) -> tuple[str, str]:
    (op,) = chain.ops
    return (
        f"{op} computes in float32, {_times(chain.count)}, because one of its inputs is float32 and the others are "
        f"{chain.dtype}: {_bytes(chain.bytes)} of outputs.",
        f"Cast that input, as in value.to({chain.dtype}), or give the op a policy: "
        f'policy={{"{_short(op)}": "lower_precision_fp"}}.',
    )


def _unlisted_float32_op(chain: Chain) -> tuple[str, str]:
    before, op, after = chain.ops
    return (
        f"{op} is in no table and runs in float32, {_times(chain.count)}, between {before} and {after}, which run in "
        f"{chain.dtype}: {_bytes(chain.bytes)} of outputs.",
        f'If {chain.dtype} is good enough for it, say so: policy={{"{_short(op)}": "lower_precision_fp"}}.',
    )


def _loss_in_fast_dtype(chain: Chain) -> tuple[str, str]:
    (op,) = chain.ops
    return (
        f"a loss is computed in {chain.dtype}, by {op}, {_times(chain.count)}.",
        "Compute it in float32: call the loss on output.float(), or give its ops the policy fp32.",
    )


_CHAINS: dict[str, Callable[[Chain], tuple[str, str]]] = {
    "round_trip": _round_trip,
    "float32_by_one_input": _float32_by_one_input,
    "unlisted_float32_op": _unlisted_float32_op,
    "loss_in_fast_dtype": _loss_in_fast_dtype,
}


def _slow_dtype(facts: Facts) -> Iterator[Finding]:
    for where, reason in facts.run.emulated.items():
        device, _, dtype = where.partition(" ")
        yield Finding(
            "slow_dtype",
            device,
            f"{dtype} is emulated: {reason}.",
            "Expect less memory and no more speed; for speed use another dtype, or another device.",
        )


def _disabled_regions(facts: Facts) -> Iterator[Finding]:
    for region in facts.regions:
        if not region.enabled and region.entries > 0:
            asked = "enabled=False asks for that"
            yield Finding(
                "disabled_region",
                region.where,
                f"the region for {region.device} is disabled, {_times(region.entries)}: {region.reason or asked}.",
                "Nothing is cast in it.",
                count=region.entries,
            )


def _unused_regions(facts: Facts) -> Iterator[Finding]:
    for region in facts.regions:
        if region.enabled and region.unused > 0:
            yield _unused(region)


def _unused(region: Region) -> Finding:
    times = "every time" if region.unused == region.entries else f"{region.unused} of {_times(region.entries)}"
    return Finding(
        "unused_region",
        region.where,
        f"the region for {region.device} was left without an op that autocast for {region.device} looked at, {times}.",
        f"See whether the tensors are on {region.device}, and whether the block is the one that computes.",
        count=region.unused,
    )


_FINDERS: tuple[_Finder, ...] = (
    _nonfinite,
    _slow_dtype,
    _disabled_regions,
    _unused_regions,
    _weights_cast_again,
    _chains,
    _recipe_in_training,
)


def _module(name: str | None) -> str:
    if name is None:
        return "outside of the model's modules"
    return name or "the model"


def _short(op: str) -> str:
    return op.removeprefix("aten::").partition(".")[0]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
