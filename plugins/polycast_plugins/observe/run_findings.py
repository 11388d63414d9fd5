"""Find losses that are not finite, skipped steps and gradients that underflow in the steps of a training run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .finding import with_remedies_once
from .records import in_ascii
from .remedies import FLOAT32_RANGE, SCALE, keep_in_float32, nonfinite_remedy
from .steps import SkippedStep, StepRecord
from .text import MUCH_UNDERFLOW


@dataclass(frozen=True)
class SkippedRow:
    """Skipped steps in a row that have the same parameters and origin.

    Attributes:
        first, last: the first and the last of them.
    """

    first: SkippedStep
    last: SkippedStep

    def __str__(self) -> str:
        if self.first.step == self.last.step:
            return str(self.first)
        scales = " to ".join(dict.fromkeys(f"{skip.scale:g}" for skip in (self.first, self.last)))
        return in_ascii(f"steps {self.first.step} to {self.last.step}, scale {scales}{self.first.cause}")


def skipped_rows(steps: Iterable[StepRecord]) -> list[SkippedRow]:
    """Return the skipped steps of a run, grouped."""
    rows: list[SkippedRow] = []
    for record in steps:
        if record.skip is None:
            continue
        first = last = replace(record.skip, step=record.step)
        if rows and rows[-1].last.step == last.step - 1 and _cause(rows[-1].last) == _cause(last):
            first = rows.pop().first
        rows.append(SkippedRow(first, last))
    return rows


def _cause(skip: SkippedStep) -> tuple[Any, ...]:
    return skip.parameters, skip.count, None if skip.origin is None else skip.origin.text


_MANY_SKIPPED = 0.1
"""The share of skipped steps, after the first ones, that is worth a finding: a scaler skips one in 2,000 by design."""
_FIRST_STEPS = 20
"""The steps in which a scaler lowers its first scale."""
_IN_A_ROW = 4


@dataclass(frozen=True)
class RunFinding:
    """A finding about a run.

    Attributes:
        kind: ``"loss_not_finite"``, ``"skipped_steps"`` or ``"gradient_underflow"``.
        step: the first step that it is about.
        what: what was found, with numbers.
        remedy: what to do.
    """

    kind: str
    step: int
    what: str
    remedy: str

    def __str__(self) -> str:
        return in_ascii(f"from step {self.step}: {self.what} {self.remedy}")


def findings_of_run(steps: Sequence[StepRecord]) -> tuple[RunFinding, ...]:
    """Return the findings about a run."""
    return (*_loss_not_finite(steps), *_skipped_steps(steps), *_gradient_underflow(steps))


def with_references(findings: Iterable[RunFinding]) -> list[RunFinding]:
    """Return findings, each with its remedy or, if an earlier one has that, with a reference to it."""
    once = with_remedies_once((each,) for each in findings)
    return [replace(finding, remedy=remedy) for (finding,), remedy in once]


def _loss_not_finite(steps: Sequence[StepRecord]) -> Iterator[RunFinding]:
    diverged = [record for record in steps if record.diverged]
    if diverged:
        first = diverged[0]
        yield RunFinding(
            "loss_not_finite",
            first.step,
            f"the loss is {first.loss} in {len(diverged):,} of {len(steps):,} steps.",
            _remedy([record.skip for record in diverged if record.skip is not None]),
        )


def _skipped_steps(steps: Sequence[StepRecord]) -> Iterator[RunFinding]:
    later = [record for record in steps if record.step >= _FIRST_STEPS]
    skipped = [record for record in later if record.skipped]
    row = _longest_row(_after_first_scales(steps))
    if (later and len(skipped) > _MANY_SKIPPED * len(later)) or len(row) >= _IN_A_ROW:
        every = [record for record in steps if record.skipped]
        scales = [record.scale for record in every if record.scale is not None]
        fell = f" The scale fell to {min(scales):.4g}." if scales else ""
        yield RunFinding(
            "skipped_steps",
            (row or every)[0].step,
            f"{len(every):,} of {len(steps):,} steps were skipped, up to {max(len(row), 1):,} in a row.{fell}",
            _remedy([record.skip for record in every if record.skip is not None]),
        )


def _after_first_scales(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps after those in which a scaler has lowered its first scale, which is too large by design."""
    first = next((number for number, record in enumerate(steps) if not record.skipped), 0)
    return steps if any(record.diverged for record in steps[:first]) else steps[first:]


def _longest_row(steps: Sequence[StepRecord]) -> list[StepRecord]:
    first, length, begin = 0, 0, 0
    for number, record in enumerate(steps):
        if not record.skipped:
            begin = number + 1
        elif number + 1 - begin > length:
            first, length = begin, number + 1 - begin
    return list(steps[first : first + length])


def _remedy(skips: Sequence[SkippedStep]) -> str:
    began_in = (skip.origin for skip in skips if skip.origin is not None)
    origins = Counter(replace(origin, what="inf or nan", stack=()) for origin in began_in)
    if not skips:
        return "Observe the steps before it: `polycast.observe(model, nonfinite='record')` finds the op that began it."
    if not origins:
        of = [f" Gradients of {skip.parameters[0]} were not finite." for skip in skips if skip.parameters]
        found = "to find the op that began it"
        return f"Pass `rerun=` to `RunLog.step`, or `nonfinite='record'` to `RunLog`, {found}.{''.join(of[:1])}"
    origin, count = origins.most_common(1)[0]
    began = f"It began in {origin.text} ({count} of {len(skips)} skipped steps)."
    if origin.phase == "backward" and origin.dtype not in FLOAT32_RANGE:
        keep = keep_in_float32(origin.op, origin.module)
        return f"{began} The scale was too large for these gradients. If it stays so at a small scale: {keep}"
    remedy = nonfinite_remedy(origin.op, origin.dtype, origin.phase, origin.module)
    return f"{began} The scale has no part in that. {remedy}"


def _gradient_underflow(steps: Sequence[StepRecord]) -> Iterator[RunFinding]:
    seen = [record for record in steps if record.gradient_underflow_share is not None]
    much = [record for record in seen if (record.gradient_underflow_share or 0.0) >= MUCH_UNDERFLOW]
    if len(much) * 2 > len(seen):
        worst = max(record.gradient_underflow_share or 0.0 for record in much)
        unscaled = all(record.scale is None for record in much)
        yield RunFinding(
            "gradient_underflow",
            much[0].step,
            f"up to {worst:.0%} of the values of the backward pass underflow, in {len(much)} of {len(seen)} observed "
            "steps.",
            SCALE if unscaled else "Use bfloat16, or find what keeps the scale small.",
        )
