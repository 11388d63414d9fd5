"""Turn what a recorder counted into facts: name the modules, find the rule that decided for each op, ask the backends.

Errors of backends are ignored.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

import polycast
from polycast import CastPolicy
from polycast.plugin import Backend, check, decide, disable_autocast, dtype_name, find_slow_dtype, get_backend

from .facts import Facts, Matmul, MatmulRows, Run, combine, total_of, with_main_decision
from .recorder import CHAIN_KINDS, NO_MODULE, ChainRow, CountRow, MatmulRow, Reading, RegionRow, phase_of
from .records import Cast, Chain, Compiled, Counts, Decision, LowBit, Module, NonFinite, NumericsRecord, Op, Region
from .remedies import Flow

_R = TypeVar("_R")
AUTOCAST_IS_OFF = "autocast is off"
_CAST_SUMS = {"casts": "count", "cast_bytes": "bytes", "cast_seconds": "seconds"} | {
    name: name for name in ("hits", "misses", "recasts", "recast_bytes")
}
"""The fields of an op that are sums of fields of its casts."""

_FUSED = dict.fromkeys(
    ("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"),
    "torch's fused path does not ask recipes (torch.backends.mha.set_fastpath_enabled(False) avoids it)",
)
"""The fused ops of torch's attention modules in eval mode, and why no recipe computes them."""


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
            seconds = sum(seconds for _, seconds in row.seconds)
            decision = Decision(row.device or "", *self._decide(row.op, row), row.calls, seconds)
            casts_of_row = self._casts(row, decision)
            casts += casts_of_row
            op = _op(row, decision, casts_of_row)
            if not op.is_inner:  # inner ops follow the op that called them
                flows += self._flows(row, decision)
            by_module.setdefault(row.module, []).append(op)
        ops = combine(op for ops in by_module.values() for op in ops)
        regions = self._regions()
        devices = self._fast_dtypes(regions)
        packages = {device: run.packages[device] for device in devices if device in run.packages}
        processors = {device: run.processors[device] for device in devices if device in run.processors}
        self._profiles = {device: _profile_of(device) for device in devices}
        return Facts(
            run=replace(run, devices=devices, emulated=slow_reasons(devices), packages=packages, processors=processors),
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
            matmuls=self._matmuls(),
            nonfinite=self._nonfinite(),
            numerics=_numerics_of(self._reading),
        )

    def _casts(self, row: CountRow, decision: Decision) -> list[Cast]:
        about = {"op": row.op, "phase": phase_of(row.backward), "module": self._reading.name_of(row.module)}
        about["policy"] = decision.policy
        return [_record(Cast, cast, **about, of="weight" if cast.of_weight else "activation") for cast in row.casts]

    def _flows(self, row: CountRow, decision: Decision) -> Iterable[Flow]:
        for source in row.sources:
            yield _record(
                Flow,
                source,
                op=row.op,
                module=self._reading.name_of(row.module),
                device=decision.device,
                policy=decision.policy,
                source=source.op or "",
                source_module=self._reading.name_of(source.module),
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
        for number, (name, kind, rule) in enumerate(self._reading.modules):
            yield Module(
                **vars(own.get(number, Counts())),
                module=name,
                kind=kind,
                rule=rule,
                entries=calls[number],
                total=total_of(totals.get(name, ())),
                ops=_sorted(combine(ops.get(number, ()))),
            )

    def _regions(self) -> tuple[Region, ...]:
        found = []
        for row in self._reading.regions:
            where = f"{row.call_site} (module rule)" if row.by_module_rule else row.call_site
            found.append(_record(Region, row, where=where, reason=_why_disabled(row)))
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
                _plain(row.fast),
                row.count,
                row.bytes,
                consumers,
            )
            if kind == "loss_root":
                roots.append(chain)
                continue
            about = row.ops[1] if kind == "unlisted_float32_op" else row.ops[0]
            policy = self._decide(about, row)[0]
            if kind == "unlisted_float32_op" and policy is not None:
                continue
            if kind == "float32_by_one_input" and policy not in (None, "promote", "passthrough"):
                continue
            found.append(chain)
        losses = {_letters(chain.ops[0]) for chain in found if chain.kind == "loss_in_fast_dtype"}
        # A node is named for the op that made it: MseLossBackward0 for aten::mse_loss.
        found += [chain for chain in roots if _letters(chain.ops[0]) not in losses]
        return tuple(sorted(combine(found), key=lambda chain: (-chain.bytes, chain.kind, chain.ops)))

    def _matmuls(self) -> tuple[Matmul, ...]:
        found = []
        for row in self._reading.counts:
            if row.flops <= 0:
                continue
            recipe, declined = row.recipe, row.declined
            if recipe is None:
                recipe, declined = self._why_not_asked(row)
            found.append(
                _record(
                    Matmul,
                    row,
                    phase=phase_of(row.backward),
                    module=self._reading.name_of(row.module),
                    recipe=recipe,
                    declined=declined or "",
                    dtype=next(iter(_by_name(row.computes)), ""),
                    seconds=sum(seconds for _, seconds in row.seconds),
                    rows=tuple(
                        _record(MatmulRows, each, op=each.kind, estimates=self._seconds(each, row.device))
                        for each in row.matmuls
                    ),
                )
            )
        return tuple(sorted(combine(found), key=lambda each: (-each.flops, each.op, each.module or "")))

    def _seconds(self, matmuls: MatmulRow, device: str | None) -> dict[str, float]:
        """Return the seconds of matmuls in each way that the profile of their device has; empty without a profile.

        For None, as in a backward pass, the profile is that of the only device of the run.
        """
        if device is None and len(self._profiles) == 1:
            (device,) = self._profiles
        profile = None if device is None else self._profiles.get(device)
        if profile is None:
            return {}
        size = max(1, round(matmuls.flops / (2 * matmuls.rows * matmuls.calls)))
        times = {way: profile.seconds(matmuls.kind, matmuls.rows, way, size) for way in profile.ways(matmuls.kind)}
        return {way: matmuls.calls * seconds for way, seconds in times.items() if seconds is not None}

    def _why_not_asked(self, row: CountRow) -> tuple[str, str]:
        """Return the active recipe, which was not asked for an op, and the reason; empty texts without a recipe."""
        active = self._overrides.get(row.override)
        if row.device is None or active is None or active.recipe is None or not active.recipe.overloads:
            return "", ""
        policy, rule, _ = self._decide(row.op, row)
        if row.op in _FUSED:
            reason = _FUSED[row.op]
        elif policy in (None, CastPolicy.MATCH.value):
            reason = "autocast has no policy for it"
        elif row.op in active.policies:
            reason = f"the {rule} names it"
        elif policy != CastPolicy.LOWER_PRECISION_FP.value:
            reason = f"its policy is {policy}"
        else:
            reason = "the recipe is not for it"
        return active.recipe.short, reason

    def _nonfinite(self) -> NonFinite | None:
        row, first = self._reading.nonfinite, self._reading.first_nonfinite()
        return None if row is None or first is None else NonFinite(**vars(first), count=row.count)

    def _decide(self, op: str, row: CountRow | ChainRow) -> tuple[str | None, str, str]:
        """Return the policy of an op in the region of a row, the kind of rule that decided it, and the rule's name."""
        if row.device is None or row.fast is None:
            return None, AUTOCAST_IS_OFF, ""
        key = op, row.device, row.override
        if key not in self._decisions:
            policy, rule, rule_name = decide(op, row.device, self._overrides.get(row.override))
            self._decisions[key] = None if policy is None else policy.value, rule, rule_name
        return self._decisions[key]


def _record(kind: type[_R], row: Any, **others: Any) -> _R:
    """Return a record with the fields that it shares with a row, dtypes as names and None as ``""``, and others."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    shared = {name: _plain(value) for name, value in vars(row).items() if name in names}
    return kind(**shared | others)


def _plain(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else "" if value is None else value


def _find_backend(device: str) -> Backend | None:
    """Return the backend of a device; None if it has none, or a broken one. Then torch's own autocast may have run."""
    try:
        return get_backend(device)
    except RuntimeError:
        return None


def _why_disabled(region: RegionRow) -> str:
    """Return why a region is disabled; empty if it is enabled, or the program disabled it."""
    if not region.enabled and region.by_module_rule:
        return "a module rule asks for that"
    backend = None if region.enabled else _find_backend(region.device)
    if backend is None:
        return ""
    if not (answer := check(backend)):
        return f"{region.device} is not available: {answer.reason.rstrip('.')}"
    answer = check(backend, region.dtype)
    return "" if answer else f"{region.dtype} is not supported: {answer.reason.rstrip('.')}"


def slow_reasons(devices: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return by device and dtype, as ``"cpu bfloat16"``, why the backend says that a fast dtype is slow there."""
    found = {}
    for device, names in devices.items():
        backend = _find_backend(device)
        if backend is None:
            continue
        for name in names:
            dtype = getattr(torch, name)
            reason = _slow_reason(backend, dtype)
            if reason and find_slow_dtype(backend, dtype) is not None:  # a plugin may know better
                found[f"{device} {name}"] = reason
    return found


def _slow_reason(backend: Backend, dtype: torch.dtype) -> str | None:
    try:
        with disable_autocast():
            return backend.slow_reason(dtype)
    except (Exception, SystemExit):  # some libraries exit if they find no device
        return None


def _profile_of(device: str) -> Any:
    find_profile = getattr(polycast, "find_profile", None)  # of the plugin fastest, without which there are no profiles
    return None if find_profile is None else find_profile(device)


def _op(row: CountRow, decision: Decision, casts: Sequence[Cast]) -> Op:
    return with_main_decision(
        Op(
            calls=row.calls,
            inner_calls=row.inner_calls,
            input_dtypes=_by_name(row.inputs),
            compute_dtypes=_by_name(row.computes),
            output_dtypes=_by_name(row.outputs),
            seconds={_plain(dtype): seconds for dtype, seconds in row.seconds},
            **{field: sum(getattr(cast, each) for cast in casts) for field, each in _CAST_SUMS.items()},
            op=row.op,
            phase=phase_of(row.backward),
            decisions=(decision,),
            stack=tuple(row.stack or ()),
        )
    )


def _sorted(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(sorted(ops, key=lambda op: (-op.time, -op.calls, op.op, op.phase)))


def _with_ancestors(name: str) -> Iterable[str]:
    """Yield the name of a module and those of the modules around it, up to the model's, ``""``."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _by_name(dtypes: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    return {dtype_name(dtype): count for dtype, count in sorted(dtypes, key=lambda each: -each[1])}


def _letters(name: str) -> str:
    base = name.removeprefix("aten::").partition(".")[0].rstrip("0123456789").removesuffix("Backward")
    return base.replace("_", "").lower()


def _numerics_of(reading: Reading) -> tuple[NumericsRecord, ...]:
    """Return the records, in the order of modules and ops, forward before backward."""
    ordered = sorted(reading.numerics, key=lambda row: (row.backward, row.module, row.op, row.of))
    return combine(
        _record(NumericsRecord, row, module=reading.name_of(row.module), role=phase_of(row.backward)) for row in ordered
    )
