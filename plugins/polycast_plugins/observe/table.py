"""Print an observation as a table of bounded length, for terminals and notebooks."""

import io
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polycast.common import plain_text

from .facts import Facts
from .findings import grouped
from .matmuls import matmul_lines
from .recipe_counts import recipe_lines
from .records import Finding, Op
from .units import size

_MAX_OPS = 20
_MAX_FINDINGS = 8
_MAX_PLACES = 3
_MAX_LOW_BIT = 8
_LONGEST_NAME = 60
_LONGEST_LINE = 400
_LONGEST_TEXT = 8000
_WIDTH = 120
_SHORT = {"backend's table": "table", "autocast is off": "off"}


def shown(facts: Facts, findings: Iterable[Finding]) -> Group:
    """Return the run, the ops and the findings, to print."""
    parts: list[RenderableType] = [Text(_cut(line, _LONGEST_LINE)) for line in _run_lines(facts)]
    parts.append(_ops(facts))
    others = len(facts.ops) - len(_called(facts)[:_MAX_OPS])
    if others:
        parts.append(Text(f"... and {others:,} more, inner ops included: see seen.ops"))
    parts += [Text(_cut(line, _LONGEST_LINE)) for line in matmul_lines(facts.matmuls)]
    parts += _bounded([_cut(line, _LONGEST_LINE) for line in recipe_lines(facts.low_bit)], _MAX_LOW_BIT, "seen.low_bit")
    groups = grouped(findings)
    if groups:
        lines = [_cut(_finding_line(group), 2 * _LONGEST_LINE) for group in groups]
        parts += [Text(""), Text("Findings", style="bold"), *_bounded(lines, _MAX_FINDINGS, "seen.findings")]
    return Group(*parts)


def _run_lines(facts: Facts) -> Iterable[str]:
    run, total = facts.run, facts.total
    what = ", ".join(f"{device} in {' and '.join(dtypes)}" for device, dtypes in run.devices.items()) or "no region"
    yield f"{what}; {run.engine} engine, {run.seconds:.2f} s"
    if facts.fast_share is not None:
        in_time = "" if facts.fast_time_share is None else f", {facts.fast_time_share:.0%} of the time in ops"
        yield f"{facts.fast_share:.0%} of the floating-point ops computed in a fast dtype{in_time}"
    cast = (
        f"{total.casts:,} casts, {total.cast_bytes:,} bytes; cast cache: {total.hits:,} hits, {total.misses:,} misses"
    )
    yield cast + (f"; {total.cast_seconds:.3f} s of casting" if run.timing else "")


def _ops(facts: Facts) -> Table:
    table = Table(box=plain_text.under_the_head(), show_edge=False, padding=0)
    for column in ("op", "pass", "calls", "policy", "by", "inputs", "outputs", "casts", "bytes"):
        number = column in ("calls", "casts", "bytes")
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for op in _called(facts)[:_MAX_OPS]:
        rule = f"{op.rule} {op.rule_name!r}" if op.rule_name else _SHORT.get(op.rule, op.rule)
        numbers = (f"{op.casts:,}" if op.casts else "", size(op.cast_bytes) if op.cast_bytes else "")
        decided = (op.op.removeprefix("aten::"), op.phase, f"{op.calls:,}", op.policy or "", rule)
        dtypes = _dtypes(op.input_dtypes), _dtypes(op.output_dtypes)
        table.add_row(*(Text(_cut(cell, _LONGEST_NAME)) for cell in (*decided, *dtypes, *numbers)))
    return table


def _called(facts: Facts) -> list[Op]:
    """Return the ops that the program called itself, and those that have a policy."""
    return [op for op in facts.ops if not op.is_inner]


def _dtypes(counts: Mapping[str, int]) -> str:
    return ", ".join(counts)


def _finding_line(group: Sequence[Finding]) -> str:
    """Return a line for findings with one remedy: the first one, and where the others are."""
    first, others = group[0], group[1:]
    places = [_cut(finding.where, _LONGEST_NAME) for finding in others[:_MAX_PLACES]]
    more = len(others) - len(places)
    also = f" The same in {', '.join(places)}{f' and {more:,} more places' if more else ''}." if places else ""
    return f"- {_cut(first.where, _LONGEST_NAME)}: {_cut(first.what, _LONGEST_LINE)}{also} {first.remedy}"


def _bounded(lines: Sequence[str], most: int, see: str) -> list[Text]:
    more = len(lines) - most
    return [Text(line) for line in (*lines[:most], *([f"... and {more:,} more: see {see}"] if more > 0 else ()))]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def as_text(shown: Group) -> str:
    """Return the text, cut off at a maximum length."""
    text = plain_text.as_text(shown, _WIDTH)
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT].rpartition(chr(10))[0]}\n... and more: see seen.ops and seen.findings"


def as_html(shown: Group) -> str:
    """Return the HTML."""
    console = Console(
        file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False, markup=False, highlight=False, emoji=False
    )
    console.print(shown)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
