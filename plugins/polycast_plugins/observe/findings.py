"""Findings: what costs time or accuracy in a run, where, how much, and what to do about it."""

import functools
from collections.abc import Callable, Iterator

from polycast.plugin import Plan

from .dtype_findings import overflow, slow_dtypes, underflow
from .facts import Facts, add
from .finding import Finding
from .matched_findings import is_matched, match_text, matched_dtypes, narrowed_from
from .records import Chain, Region
from .remedies import FAST, RemedyTrial, may_have, name_of, nonfinite_remedy, policy_text
from .text import module_text, times_text
from .text import size as _bytes

_Finder = Callable[[Facts], Iterator[Finding]]


def findings_of(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings of a run, in the order of the finders below."""
    return tuple(finding for finder in _FINDERS for finding in finder(facts))


def _nonfinite(facts: Facts) -> Iterator[Finding]:
    seen = facts.nonfinite
    if seen is not None:
        where = module_text(seen.module)
        called = f" It was called at {seen.stack[-1]}." if seen.stack else ""
        matched = narrowed_from(facts.casts, seen.op, seen.module, seen.phase, seen.dtype)
        yield Finding(
            "nonfinite",
            where,
            f"{seen.op} was the first op to turn finite inputs into {seen.what} ({seen.dtype}, {seen.phase}); "
            f"ops did so {times_text(seen.count)}.{called}{match_text(matched, seen.dtype)}",
            nonfinite_remedy(seen.op, seen.dtype, seen.phase, seen.module, bool(matched)),
            module=seen.module,
            ops=(seen.op,),
            count=seen.count,
        )


def _weights_cast_again(facts: Facts) -> Iterator[Finding]:
    by_module: dict[str | None, int] = {}
    count = size = 0
    for cast in facts.casts:
        if cast.recasts > 0 and not is_matched(cast):  # MATCH caches none
            by_module[cast.module] = by_module.get(cast.module, 0) + cast.recast_bytes
            count, size = count + cast.recasts, size + cast.recast_bytes
    if count:
        most = max(by_module, key=lambda module: by_module[module])
        others = len(by_module) - 1
        rate = size / facts.run.seconds if facts.run.seconds > 0 else 0.0
        yield Finding(
            "weights_cast_again",
            module_text(most) + (f" and {others} other module{'s' * (others > 1)}" if others else ""),
            f"weights were cast again {times_text(count)} although they had not changed: {_bytes(size)}, "
            f"{_bytes(rate)} per second.",
            "Pass a cache that outlives the region: `polycast.autocast(..., cache=polycast.WeightCache())`.",
            module=most,
            count=count,
            bytes=size,
            bytes_per_second=rate,
        )


def _recipe_in_training(facts: Facts) -> Iterator[Finding]:
    for recipe in dict.fromkeys(record.recipe for record in facts.low_bit):
        refused = [each for each in facts.low_bit if each.recipe == recipe and each.declined == Plan.RECORDS]
        count = sum(each.calls for each in refused)
        if count > 0:
            yield Finding(
                "recipe_in_training",
                refused[0].device,
                f"ops of the recipe {recipe} ran in the fast dtype {times_text(count)}, because {Plan.RECORDS}.",
                "Run inference under `torch.no_grad()` or `torch.inference_mode()`.",
                ops=tuple(dict.fromkeys(each.op for each in refused)),
                count=count,
            )


def _chains(facts: Facts) -> Iterator[Finding]:
    trial = RemedyTrial(facts.flows)
    for kind, explain in _CHAINS.items():
        alike: dict[tuple[object, ...], list[Chain]] = {}
        for chain in facts.chains:
            if chain.kind == kind:
                alike.setdefault((_about(chain), chain.module, chain.dtype), []).append(chain)
        for group in alike.values():
            together = functools.reduce(add, group)
            if together.count <= 0:  # in a difference of observations
                continue
            what, remedy = explain(together, group, trial)
            yield Finding(
                kind,
                module_text(together.module),
                what,
                remedy,
                module=together.module,
                ops=together.ops,
                count=together.count,
                bytes=together.bytes,
                bytes_per_second=together.bytes / facts.run.seconds if facts.run.seconds > 0 else 0.0,
            )


def _about(chain: Chain) -> tuple[str, ...]:
    """Return the ops that identify a finding: an unlisted op is one finding, whatever runs before and after it."""
    if chain.kind != "unlisted_float32_op":
        return chain.ops
    _, op, _ = chain.ops
    return (op,)


def _round_trip(chain: Chain, _: list[Chain], trial: RemedyTrial) -> tuple[str, str]:
    down, up = chain.ops
    asked = [] if trial.is_kept_in_float32(name_of(up)) else [(name_of(up), FAST)]
    asked.append((name_of(down), "fp32"))
    saving = next((policy_text(name, policy) for name, policy in asked if _saved(trial, name, policy) > 0), None)
    return (
        f"an activation is cast to {chain.dtype} for {down} and back to float32 for {up}, {times_text(chain.count)}: "
        f"{_bytes(chain.bytes)} cast.",
        _NO_POLICY[trial.has_flows] if saving is None else f"Compute both in one dtype: {saving}.",
    )


def _float32_by_one_input(chain: Chain, _: list[Chain], trial: RemedyTrial) -> tuple[str, str]:
    (op,) = chain.ops
    remedy = f"Cast that input, as in `value.to(torch.{chain.dtype})`"
    if _saved(trial, name_of(op), FAST) > 0:
        remedy += f", or give the op a policy: {policy_text(name_of(op), FAST)}"
    return (
        f"{op} computes in float32, {times_text(chain.count)}, because one input is float32 and the others are "
        f"{chain.dtype}: {_bytes(chain.bytes)} of outputs.",
        f"{remedy}.",
    )


def _unlisted_float32_op(chain: Chain, chains: list[Chain], trial: RemedyTrial) -> tuple[str, str]:
    op, dtype = chain.ops[1], chain.dtype
    before, after = (" and ".join(dict.fromkeys(each.ops[at] for each in chains)) for at in (0, 2))
    where = f", in {_few([module_text(name) for name in chain.consumers])}" if chain.consumers else ""
    casts = sum(chain.consumers.values()) or chain.count
    what = (
        f"{op} has no policy and runs in float32, {times_text(chain.count)}, between {before} and {after}, which run "
        f"in {dtype}: {_bytes(chain.bytes)} of outputs, cast {times_text(casts)}{where}."
    )
    saved = {name: _saved(trial, name, FAST) for name in trial.upstream(op, chain.module)[:_MAX_TRIED]}
    best = max(saved, key=lambda name: saved[name])
    if saved[best] > 0:
        return (
            what,
            f"If {best} may run in {dtype}, {policy_text(best, FAST)} saves about {_bytes(saved[best])} of casts.",
        )
    if (trial.change_unconverted(op, chain.module) or 0) < 0:
        return what, f"The program converts its input to float32. If {op} may run in {dtype}, remove the conversion."
    return what, _NO_POLICY[trial.has_flows]


def _loss_in_fast_dtype(chain: Chain, _: list[Chain], __: RemedyTrial) -> tuple[str, str]:
    (op,) = chain.ops
    return (
        f"a loss is computed in {chain.dtype}, by {op}, {times_text(chain.count)}.",
        "Compute it in float32: call the loss on `output.float()`, or give its ops the policy fp32.",
    )


_CHAINS: dict[str, Callable[[Chain, list[Chain], RemedyTrial], tuple[str, str]]] = {
    "round_trip": _round_trip,
    "float32_by_one_input": _float32_by_one_input,
    "unlisted_float32_op": _unlisted_float32_op,
    "loss_in_fast_dtype": _loss_in_fast_dtype,
}
_MAX_TRIED = 8
_NO_POLICY = (
    "This observation lacks the flows between ops from which a policy could be suggested.",
    "Leave it: no policy for a single op would save casts.",
)


def _saved(trial: RemedyTrial, name: str, policy: str) -> int:
    """Return how many bytes of casts a policy for an op would save; 0 if unknown."""
    return -(trial.change(name, policy) or 0) if may_have(name, policy) else 0


def _few(names: list[str]) -> str:
    """Return the first few names, and the number of others."""
    shown, more = names[:_MAX_NAMES], len(names) - _MAX_NAMES
    return " and ".join([", ".join(shown), f"{more:,} more"]) if more > 0 else ", ".join(shown)


_MAX_NAMES = 4


def _disabled_regions(facts: Facts) -> Iterator[Finding]:
    for region in facts.regions:
        if not region.enabled and region.entries > 0:
            asked = "enabled=False asks for that"
            yield Finding(
                "disabled_region",
                region.where,
                f"the region for {region.device} is disabled, {times_text(region.entries)}: {region.reason or asked}.",
                "It casts nothing.",
                count=region.entries,
            )


def _unused_regions(facts: Facts) -> Iterator[Finding]:
    for region in facts.regions:
        if region.enabled and region.unused > 0:
            yield _unused(region)


def _unused(region: Region) -> Finding:
    times = "every time" if region.unused == region.entries else f"{region.unused} of {times_text(region.entries)}"
    return Finding(
        "unused_region",
        region.where,
        f"no op in the region for {region.device} reached autocast, {times}.",
        f"Check that the tensors are on {region.device}, and that the region is around the code that computes.",
        count=region.unused,
    )


_FINDERS: tuple[_Finder, ...] = (
    _nonfinite,
    overflow,
    underflow,
    slow_dtypes,
    _disabled_regions,
    _unused_regions,
    _weights_cast_again,
    matched_dtypes,
    _chains,
    _recipe_in_training,
)
