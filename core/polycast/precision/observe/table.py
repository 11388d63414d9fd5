"""An observation as tables, for a terminal and for a notebook."""

import io
from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .facts import Facts, share, total_of
from .low_bit_counts import low_bit_lines
from .matmuls import matmul_lines
from .records import Finding, Op

_MOST = 30
_WIDTH = 120
_SHORT = {"backend's table": "table", "autocast is off": "off"}


def shown(facts: Facts, findings: Iterable[Finding]) -> Group:
    """Return what people see of an observation: the run, the ops, what was found."""
    parts: list[RenderableType] = [Text(line) for line in _run_lines(facts)]
    parts.append(_ops(facts))
    others = len(facts.ops) - len(_called(facts)[:_MOST])
    if others:
        parts.append(Text(f"... and {others} more, with those that other ops are made of, in to_dict()"))
    parts += [Text(line) for line in (*matmul_lines(facts.matmuls), *low_bit_lines(facts.low_bit))]
    found = [Text(f"- {finding}") for finding in findings]
    if found:
        parts += [Text(""), Text("Findings", style="bold"), *found]
    return Group(*parts)


def _run_lines(facts: Facts) -> Iterable[str]:
    run, total = facts.run, total_of(facts.ops)
    what = ", ".join(f"{device} in {' and '.join(dtypes)}" for device, dtypes in run.devices.items()) or "no region"
    yield f"{what}; {run.engine} engine, {run.seconds:.2f} s"
    fast, of_time = share(total.compute_dtypes, run.devices), share(total.seconds, run.devices)
    if fast is not None:
        in_time = "" if of_time is None else f", {of_time:.0%} of the time in ops"
        yield f"{fast:.0%} of the floating-point ops computed in a fast dtype{in_time}"
    cast = f"{total.casts:,} casts, {total.cast_bytes:,} bytes; kept casts: {total.hits:,} found, {total.misses:,} not"
    yield cast + (f"; {total.cast_seconds:.3f} s of casting" if run.timing else "")


def _ops(facts: Facts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("op", "pass", "calls", "policy", "by", "inputs", "outputs", "casts", "bytes"):
        number = column in ("calls", "casts", "bytes")
        table.add_column(column, justify="right" if number else "left", no_wrap=column != "by", overflow="fold")
    for op in _called(facts)[:_MOST]:
        rule = f"{op.rule} {op.rule_name!r}" if op.rule_name else _SHORT.get(op.rule, op.rule)
        numbers = (f"{number:,}" if number else "" for number in (op.casts, op.cast_bytes))
        cells = (op.op.removeprefix("aten::"), op.phase, f"{op.calls:,}", op.policy or "", rule)
        table.add_row(*map(Text, (*cells, _dtypes(op.input_dtypes), _dtypes(op.output_dtypes), *numbers)))
    return table


def _called(facts: Facts) -> list[Op]:
    """Return the ops that the program called itself, and those that autocast has a policy for."""
    return [op for op in facts.ops if op.calls != op.inner_calls or op.policy is not None]


def _dtypes(counts: Mapping[str, int]) -> str:
    return ", ".join(counts)


def as_text(shown: Group) -> str:
    """Return it as text."""
    console = Console(file=io.StringIO(), width=_WIDTH, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def as_html(shown: Group) -> str:
    """Return it as HTML."""
    console = Console(
        file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False, markup=False, highlight=False, emoji=False
    )
    console.print(shown)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
