"""Turn what a recorder counted into facts: name the modules, and find the rule that decided for each op."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from polycast import CastPolicy
from polycast.plugin import decide, dtype_name

from .backend_queries import DeviceProfiles, slow_reasons, why_not_enabled
from .facts import Facts, Run, combine, total_of, with_main_decision
from .recipe_counts import FUSED, Matmul, MatmulRows
from .recorder import CHAIN_KINDS, NO_MODULE, CountRow, NumericsRow, Reading, phase_of
from .records import Cast, Chain, Compiled, Counts, Decision, LowBit, Module, NonFinite, NumericsRecord, Op, Region
from .remedies import Flow
from .steps import first_nonfinite

AUTOCAST_IS_OFF = "autocast is off"
_CAST_SUMS = {
    "casts": "count",
    "cast_bytes": "bytes",
    "cast_seconds": "seconds",
    "hits": "hits",
    "misses": "misses",
    "recasts": "recasts",
    "recast_bytes": "recast_bytes",
}
"""The fields of an op that are sums of fields of its casts."""


def facts_of(reading: Reading, run: Run, low_bit: tuple[LowBit, ...]) -> Facts:
    """Return the facts of a run from a recorder's counts, and those of the recipes."""
    return _Counting(reading).facts(run, low_bit)


class _Counting:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._overrides = reading.overrides
        self._decisions: dict[tuple[object, ...], tuple[str | None, str, str]] = {}

    def facts(self, run: Run, low_bit: tuple[LowBit, ...]) -> Facts:
        by_module: dict[int, list[Op]] = {}
        casts: list[Cast] = []
        flows: list[Flow] = []
        for row in self._reading.counts:
            decision = Decision(row.device or "", *self._decide(row.op, row.device, row.fast, row.override), row.calls)
            casts_of_row = self._casts(row)
            casts += casts_of_row
            op = _op(row, decision, casts_of_row)
            if not op.is_inner:  # inner ops follow the op that called them
                flows += self._flows(row, decision)
            by_module.setdefault(row.module, []).append(op)
        ops = combine(op for ops in by_module.values() for op in ops)
        regions = self._regions()
        devices = self._fast_dtypes(regions)
        return Facts(
            run=replace(run, devices=devices, emulated=slow_reasons(devices)),
            ops=_sorted(ops),
            modules=tuple(self._module_records(by_module)),
            casts=tuple(sorted(combine(casts), key=lambda cast: (-cast.bytes, cast.op, cast.module or ""))),
            regions=regions,
            compiled=combine(
                Compiled(name, self._reading.name_of(module), calls) for name, module, calls in self._reading.compiled
            ),
            chains=self._chains(),
            flows=combine(flows),
            low_bit=low_bit,
            matmuls=self._matmuls(DeviceProfiles(devices)),
            nonfinite=self._nonfinite(),
            numerics=_numerics_of(self._reading),
        )

    def _casts(self, row: CountRow) -> list[Cast]:
        return [
            Cast(
                op=row.op,
                phase=phase_of(row.backward),
                module=self._reading.name_of(row.module),
                source=dtype_name(cast.source),
                target=dtype_name(cast.target),
                of="weight" if cast.of_weight else "activation",
                count=cast.count,
                bytes=cast.bytes,
                seconds=cast.seconds,
                hits=cast.hits,
                misses=cast.misses,
                recasts=cast.recasts,
                recast_bytes=cast.recast_bytes,
            )
            for cast in row.casts
        ]

    def _flows(self, row: CountRow, decision: Decision) -> Iterable[Flow]:
        for source in row.sources:
            yield Flow(
                op=row.op,
                module=self._reading.name_of(row.module),
                device=decision.device,
                policy=decision.policy,
                source=source.op or "",
                source_module=self._reading.name_of(source.module),
                dtype=dtype_name(source.dtype),
                cast=_name_or_empty(source.cast),
                is_first=source.is_first,
                asked_from=_name_or_empty(source.asked_from),
                count=source.count,
                bytes=source.bytes,
                casts=source.casts,
                cast_bytes=source.cast_bytes,
            )

    def _fast_dtypes(self, regions: Iterable[Region]) -> dict[str, list[str]]:
        """Return by device the fast dtypes of its regions, the most used first."""
        calls: Counter[tuple[str, str]] = Counter()
        for row in self._reading.counts:
            if row.device is not None and row.fast is not None:
                calls[row.device, dtype_name(row.fast)] += row.calls
        for region in regions:
            if region.enabled:
                calls[region.device, region.dtype] += 0
        devices: dict[str, list[str]] = {}
        for (device, name), _ in calls.most_common():
            devices.setdefault(device, []).append(name)
        return devices

    def _module_records(self, ops: Mapping[int, list[Op]]) -> Iterable[Module]:
        calls: Counter[int] = Counter()
        for module, count in self._reading.entries:
            calls[module] += count
        own = {number: total_of(of_module) for number, of_module in ops.items()}
        totals: dict[str, list[Counts]] = {}
        for number, counts in own.items():
            for name in _with_ancestors(self._reading.modules[number].name) if number != NO_MODULE else ():
                totals.setdefault(name, []).append(counts)
        for number, (name, kind) in enumerate(self._reading.modules):
            yield Module(
                **vars(own.get(number, Counts())),
                module=name,
                kind=kind,
                entries=calls[number],
                total=total_of(totals.get(name, ())),
                ops=_sorted(combine(ops.get(number, ()))),
            )

    def _regions(self) -> tuple[Region, ...]:
        found = []
        for row in self._reading.regions:
            reason = ""
            if not row.enabled:
                reason = "a module rule asks for that" if row.by_module_rule else why_not_enabled(row.device, row.dtype)
            found.append(
                Region(
                    where=f"{row.call_site} (module rule)" if row.by_module_rule else row.call_site,
                    device=row.device,
                    enabled=row.enabled,
                    dtype=dtype_name(row.dtype),
                    reason=reason,
                    entries=row.entries,
                    unused=row.unused,
                    ops=row.ops,
                    compiled=row.compiled,
                )
            )
        return combine(found)

    def _chains(self) -> tuple[Chain, ...]:
        found, roots = [], []
        for row in self._reading.chains:
            kind = CHAIN_KINDS[row.kind]
            consumers = {} if row.consumer == NO_MODULE else {self._reading.modules[row.consumer].name: row.casts}
            chain = Chain(
                "loss_in_fast_dtype" if kind in ("loss", "loss_root") else kind,
                tuple(row.ops),
                self._reading.name_of(row.module),
                _name_or_empty(row.fast),
                row.count,
                row.bytes,
                consumers,
            )
            if kind == "loss_root":
                roots.append(chain)
                continue
            about = row.ops[1] if kind == "unlisted_float32_op" else row.ops[0]
            policy = self._decide(about, row.device, row.fast, row.override)[0]
            if kind == "unlisted_float32_op" and policy is not None:
                continue
            if kind == "float32_by_one_input" and policy not in (None, "promote", "passthrough"):
                continue
            found.append(chain)
        losses = {_letters(chain.ops[0]) for chain in found if chain.kind == "loss_in_fast_dtype"}
        # A node is named for the op that made it: MseLossBackward0 for aten::mse_loss.
        found += [chain for chain in roots if _letters(chain.ops[0]) not in losses]
        return tuple(sorted(combine(found), key=lambda chain: (-chain.bytes, chain.kind, chain.ops)))

    def _matmuls(self, profiles: DeviceProfiles) -> tuple[Matmul, ...]:
        found = []
        for row in self._reading.counts:
            if row.flops <= 0:
                continue
            recipe, declined = row.recipe, row.declined
            if recipe is None:
                recipe, declined = self._why_not_asked(row.op, row.device, row.fast, row.override)
            found.append(
                Matmul(
                    op=row.op,
                    phase=phase_of(row.backward),
                    module=self._reading.name_of(row.module),
                    device=row.device or "",
                    recipe=recipe,
                    declined=declined or "",
                    dtype=next(iter(_by_name(row.computes)), ""),
                    calls=row.calls,
                    seconds=sum(seconds for _, seconds in row.seconds),
                    flops=row.flops,
                    rows=tuple(
                        MatmulRows(each.kind, each.rows, each.calls, each.flops, profiles.seconds(each, row.device))
                        for each in row.matmuls
                    ),
                )
            )
        return tuple(sorted(combine(found), key=lambda each: (-each.flops, each.op, each.module or "")))

    def _why_not_asked(self, op: str, device: str | None, dtype: torch.dtype | None, override: int) -> tuple[str, str]:
        """Return the active recipe, which was not asked for an op, and the reason; empty texts without a recipe."""
        active = self._overrides.get(override)
        if device is None or active is None or active.recipe is None or not active.recipe.overloads:
            return "", ""
        policy, rule, _ = self._decide(op, device, dtype, override)
        if op in FUSED:
            reason = FUSED[op]
        elif policy is None:
            reason = "autocast has no policy for it"
        elif op in active.policies:
            reason = f"the {rule} names it"
        elif policy != CastPolicy.LOWER_PRECISION_FP.value:
            reason = f"its policy is {policy}"
        else:
            reason = "the recipe is not for it"
        return active.recipe.short, reason

    def _nonfinite(self) -> NonFinite | None:
        row, first = self._reading.nonfinite, first_nonfinite(self._reading)
        return None if row is None or first is None else NonFinite(**vars(first), count=row.count)

    def _decide(
        self, op: str, device: str | None, dtype: torch.dtype | None, override: int
    ) -> tuple[str | None, str, str]:
        """Return the policy of an op, the kind of rule that decided it, and the rule's name."""
        if device is None or dtype is None:
            return None, AUTOCAST_IS_OFF, ""
        key = op, device, override
        if key not in self._decisions:
            policy, rule, rule_name = decide(op, device, self._overrides.get(override))
            self._decisions[key] = None if policy is None else policy.value, rule, rule_name
        return self._decisions[key]


def _op(row: CountRow, decision: Decision, casts: Sequence[Cast]) -> Op:
    return with_main_decision(
        Op(
            calls=row.calls,
            inner_calls=row.inner_calls,
            input_dtypes=_by_name(row.inputs),
            compute_dtypes=_by_name(row.computes),
            output_dtypes=_by_name(row.outputs),
            seconds={_name_or_empty(dtype): seconds for dtype, seconds in row.seconds},
            **{field: sum(getattr(cast, each) for cast in casts) for field, each in _CAST_SUMS.items()},
            op=row.op,
            phase=phase_of(row.backward),
            decisions=(decision,),
            stack=tuple(row.stack or ()),
        )
    )


def _sorted(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(sorted(ops, key=lambda op: (-op.calls, op.op, op.phase)))


def _with_ancestors(name: str) -> Iterable[str]:
    """Yield the name of a module and those of the modules around it, up to the model's, ``""``."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _name_or_empty(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else dtype_name(dtype)


def _by_name(dtypes: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    return {dtype_name(dtype): count for dtype, count in sorted(dtypes, key=lambda each: -each[1])}


def _letters(name: str) -> str:
    base = name.removeprefix("aten::").partition(".")[0].rstrip("0123456789").removesuffix("Backward")
    return base.replace("_", "").lower()


def _numerics_of(reading: Reading) -> tuple[NumericsRecord, ...]:
    """Return the records, in the order of modules and ops, forward before backward."""
    ordered = sorted(reading.numerics, key=lambda row: (row.backward, row.module, row.op, row.of))
    return combine(_numerics_record(row, reading.name_of(row.module)) for row in ordered)


def _numerics_record(row: NumericsRow, module: str | None) -> NumericsRecord:
    return NumericsRecord(
        module=module,
        op=row.op,
        role=phase_of(row.backward),
        dtype=dtype_name(row.dtype),
        count=row.count,
        amax=row.amax,
        underflowed=row.underflowed,
        overflowed=row.overflowed,
        of=row.of,
        source="" if row.source is None else dtype_name(row.source),
        zeroed=row.zeroed,
        nonfinite=row.nonfinite,
    )
