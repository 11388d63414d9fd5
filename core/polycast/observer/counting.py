"""What a recorder counted, as facts: the modules by their names, and what decided for the ops."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..engine.call_sites import BY_MODULE_RULE
from ..engine.installation import installed
from ..engine.kernels import autocast_key
from ..engine.recorder import CHAIN_KINDS, NO_MODULE, Reading
from ..engine.state import Override, Settings
from ..plugins.backend import Backend
from ..plugins.discovery import check_availability
from ..plugins.registry import registry
from ..policy.cast_policy import CastPolicy
from ..policy.dtypes import dtype_name
from ..region.autocast import why_disabled
from ..region.explain import deciding_rule
from ..region.explanation import NO_RULE, OTHERS_KERNEL
from ..torch_internals.dispatcher import has_kernel_for_dispatch_key
from .facts import Facts, Run, total_of
from .known_modules import Known
from .matmuls import FUSED
from .records import (
    Cast,
    Chain,
    Compiled,
    Counts,
    Decision,
    Flow,
    Matmul,
    Module,
    NonFinite,
    Op,
    Region,
)
from .sums import combine, with_main_decision

AUTOCAST_IS_OFF = "autocast is off"


def facts_of(reading: Reading, modules: Sequence[Known], run: Run) -> Facts:
    """Return the facts that a recorder counted in a run."""
    return _Counted(reading, modules).facts(run)


class _Counted:
    def __init__(self, reading: Reading, modules: Sequence[Known]) -> None:
        self._reading = reading
        self._modules = modules
        self._overrides: dict[int, Override] = {number: held[0] for number, held in reading["overrides"].items()}
        self._decisions: dict[tuple[object, ...], tuple[str | None, str, str]] = {}

    def facts(self, run: Run) -> Facts:
        in_modules: dict[int, list[Op]] = {}
        casts: list[Cast] = []
        flows: list[Flow] = []
        fast: Counter[tuple[str, str]] = Counter()
        for row in self._reading["counts"]:
            op, phase, module, device, dtype = row[0], _phase(row[1]), row[2], row[3], row[4]
            of_this = [
                Cast(op, phase, self._name(module), dtype_name(source), dtype_name(target), _kind(weight), *numbers)
                for source, target, weight, *numbers in _in_order(row[12])
            ]
            casts += of_this
            decision = Decision(device or "", *self._decide(op, device, dtype, row[5]), calls=row[6])
            if decision.policy is not None or row[6] != row[7]:  # what other ops are made of follows them
                flows += self._flows(decision, op, module, row[14])
            if device is not None and dtype is not None:
                fast[device, dtype_name(dtype)] += row[6]
            counted = Op(
                calls=row[6],
                inner_calls=row[7],
                input_dtypes=_by_name(row[8]),
                compute_dtypes=_by_name(row[9]),
                output_dtypes=_by_name(row[10]),
                seconds={"" if dtype is None else dtype_name(dtype): seconds for dtype, seconds in row[11]},
                casts=sum(cast.count for cast in of_this),
                cast_bytes=sum(cast.bytes for cast in of_this),
                cast_seconds=sum(cast.seconds for cast in of_this),
                hits=sum(cast.hits for cast in of_this),
                misses=sum(cast.misses for cast in of_this),
                recasts=sum(cast.recasts for cast in of_this),
                recast_bytes=sum(cast.recast_bytes for cast in of_this),
                op=op,
                phase=phase,
                decisions=(decision,),
                stack=tuple(row[13] or ()),
            )
            in_modules.setdefault(module, []).append(with_main_decision(counted))
        ops = combine((), (op for ops in in_modules.values() for op in ops))
        regions = self._regions()
        for region in regions:
            if region.enabled:
                fast[region.device, region.dtype] += 0
        devices: dict[str, list[str]] = {}
        for (device, name), _ in fast.most_common():
            devices.setdefault(device, []).append(name)
        return Facts(
            run=replace(run, devices=devices, emulated=_emulated(devices)),
            ops=tuple(sorted(ops, key=lambda op: (-op.calls, op.op, op.phase))),
            modules=tuple(self._in_modules(in_modules)),
            casts=tuple(sorted(combine((), casts), key=lambda cast: (-cast.bytes, cast.op, cast.module or ""))),
            regions=regions,
            compiled=combine(
                (), (Compiled(name, self._name(module), calls) for name, module, calls in self._reading["compiled"])
            ),
            chains=self._chains(),
            flows=combine((), flows),
            matmuls=self._matmuls(),
            nonfinite=self._nonfinite(),
        )

    def _in_modules(self, ops: Mapping[int, list[Op]]) -> Iterable[Module]:
        entries: Counter[int] = Counter()
        for module, count in self._reading["entries"]:
            entries[module] += count
        own = {number: total_of(tuple(of_module)) for number, of_module in ops.items()}
        inside: dict[str, list[Counts]] = {}
        for number, counts in own.items():
            for around in _with_those_around(self._modules[number].name) if number != NO_MODULE else ():
                inside.setdefault(around, []).append(counts)
        for number, (name, kind) in enumerate(self._modules):
            yield Module(
                **_fields(own.get(number, Counts())),
                module=name,
                kind=kind,
                entries=entries[number],
                total=total_of(inside.get(name, ())),
                ops=tuple(sorted(combine((), ops.get(number, ())), key=lambda op: (-op.calls, op.op, op.phase))),
            )

    def _regions(self) -> tuple[Region, ...]:
        found = []
        for where, device, enabled, dtype, *counts in self._reading["regions"]:
            reason = ""
            if not enabled:
                by_rule = where.endswith(BY_MODULE_RULE)
                reason = "a rule for the module asks for that" if by_rule else _refusal(device, dtype)
            found.append(Region(where, device, enabled, dtype_name(dtype), reason, *counts))
        return combine((), found)

    def _chains(self) -> tuple[Chain, ...]:
        found, roots = [], []
        for number, ops, override, module, device, dtype, consumer, count, size, cast_count in self._reading["chains"]:
            kind, fast = CHAIN_KINDS[number], "" if dtype is None else dtype_name(dtype)
            consumers = {} if consumer == NO_MODULE else {self._modules[consumer].name: cast_count}
            if kind == "loss_root":
                roots.append(Chain("loss_in_fast_dtype", tuple(ops), self._name(module), fast, count, size))
                continue
            about = ops[1] if kind == "unlisted_float32_op" else ops[0]
            policy = self._decide(about, device, dtype, override)[0]
            if kind == "unlisted_float32_op" and policy is not None:
                continue
            if kind == "float32_by_one_input" and policy not in (None, "promote", "passthrough"):
                continue
            kind = "loss_in_fast_dtype" if kind == "loss" else kind
            found.append(Chain(kind, tuple(ops), self._name(module), fast, count, size, consumers))
        losses = {_letters(chain.ops[0]) for chain in found if chain.kind == "loss_in_fast_dtype"}
        # A node is named for the op that made it: MseLossBackward0 for aten::mse_loss.
        found += [chain for chain in roots if _letters(chain.ops[0]) not in losses]
        return tuple(sorted(combine((), found), key=lambda chain: (-chain.bytes, chain.kind, chain.ops)))

    def _matmuls(self) -> tuple[Matmul, ...]:
        found = []
        for op, backward, module, device, dtype, override, recipe, declined, calls, flops in self._reading["matmuls"]:
            if recipe is None:
                recipe, declined = self._not_asked(op, device, dtype, override)
            found.append(
                Matmul(op, _phase(backward), self._name(module), device or "", recipe, declined or "", calls, flops)
            )
        return tuple(sorted(combine((), found), key=lambda each: (-each.flops, each.op, each.module or "")))

    def _not_asked(self, op: str, device: str | None, dtype: torch.dtype | None, override: int) -> tuple[str, str]:
        """Return the recipe that an op ran under, which was not asked for it, and the reason; two empty texts: none."""
        laid_over = self._overrides.get(override)
        if device is None or laid_over is None or laid_over.recipe is None or not laid_over.recipe.overloads:
            return "", ""
        policy, rule, _ = self._decide(op, device, dtype, override)
        if op in FUSED:
            reason = FUSED[op]
        elif policy is None:
            reason = "autocast has no policy for it"
        elif op in laid_over:
            reason = f"the {rule} names it"
        elif policy != CastPolicy.LOWER_PRECISION_FP.value:
            reason = f"its policy is {policy}"
        else:
            reason = "the recipe is not for it"
        return laid_over.recipe.short, reason

    def _flows(self, decision: Decision, op: str, module: int, sources: Iterable[tuple[Any, ...]]) -> Iterable[Flow]:
        """Yield what an op was given, where autocast looked at it."""
        for source, source_module, dtype, cast, is_first, asked_from, *numbers in sources:
            yield Flow(
                op,
                self._name(module),
                decision.device,
                decision.policy,
                source or "",
                self._name(source_module),
                dtype_name(dtype),
                "" if cast is None else dtype_name(cast),
                is_first,
                "" if asked_from is None else dtype_name(asked_from),
                *numbers,
            )

    def _nonfinite(self) -> NonFinite | None:
        found = self._reading["nonfinite"]
        if found is None:
            return None
        op, backward, module, inf, nan, dtype, stack, count = found
        what = " and ".join(name for name, is_there in (("inf", inf), ("nan", nan)) if is_there)
        return NonFinite(op, _phase(backward), self._name(module), what, dtype_name(dtype), tuple(stack or ()), count)

    def _name(self, module: int) -> str | None:
        return None if module == NO_MODULE else self._modules[module].name

    def _decide(
        self, op: str, device: str | None, dtype: torch.dtype | None, override: int
    ) -> tuple[str | None, str, str]:
        """Return the policy of an op, what decided it, and the name of that."""
        if device is None or dtype is None:
            return None, AUTOCAST_IS_OFF, ""
        key = op, device, override
        if key not in self._decisions:
            backend = _backend(device)
            if backend is None or device not in installed:
                theirs = has_kernel_for_dispatch_key(op, autocast_key(device))
                self._decisions[key] = None, OTHERS_KERNEL if theirs else NO_RULE, ""
            else:
                settings = Settings(device, True, dtype, override=self._overrides.get(override))
                policy, rule, rule_name = deciding_rule(op, settings, backend)
                self._decisions[key] = None if policy is None else policy.value, rule, rule_name
        return self._decisions[key]


def _with_those_around(name: str) -> Iterable[str]:
    """Yield the name of a module, and the names that the modules around it can have, up to the model's, ``""``."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _fields(counts: Counts) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in Counts.__dataclass_fields__}


def _phase(backward: bool) -> str:
    return "backward" if backward else "forward"


def _kind(weight: bool) -> str:
    return "weight" if weight else "activation"


def _in_order(casts: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
    """Return casts with their numbers in the order of the fields of a Cast."""
    for source, target, weight, count, size, hits, misses, recasts, recast_bytes, seconds in casts:
        yield source, target, weight, count, size, seconds, hits, misses, recasts, recast_bytes


def _by_name(dtypes: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    return {dtype_name(dtype): count for dtype, count in sorted(dtypes, key=lambda each: -each[1])}


def _letters(name: str) -> str:
    base = name.removeprefix("aten::").partition(".")[0].rstrip("0123456789").removesuffix("Backward")
    return base.replace("_", "").lower()


def _backend(device: str) -> Backend | None:
    try:
        return registry.find(device)
    except RuntimeError:  # nobody serves it, or who does is broken: torch's own autocast may have run on it
        return None


def _refusal(device: str, dtype: torch.dtype) -> str:
    """Say why a region cannot be enabled; nothing if it can, so that being disabled was asked for."""
    backend = _backend(device)
    if backend is None:
        return ""
    refusal = why_disabled(backend, dtype, check_availability(backend)) or ""
    return refusal.replace("Disabling autocast.", "").replace("\n", "").strip().rstrip(".")


def _emulated(devices: Mapping[str, Iterable[str]]) -> dict[str, str]:
    found = {}
    for device, names in devices.items():
        backend = _backend(device)
        for name in names if backend is not None else ():
            assert backend is not None
            try:
                reason = backend.emulates(getattr(torch, name))
            except Exception:  # a plugin's: what it cannot say is not said
                reason = None
            if isinstance(reason, str) and reason:
                found[f"{device} {name}"] = reason
    return found
