"""Write an observation as text: sizes, shares and times, and a table of bounded length."""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .facts import Facts, Matmul, is_by_recipe, recipe_share
from .finding import Finding, grouped, with_remedies_once
from .records import Decision, LowBit, Op

MUCH_UNDERFLOW = 0.1
"""The smallest share of underflow that is a finding."""


def size(count: float) -> str:
    """Format a number of bytes, as in ``1.5 KB``."""
    for unit in ("bytes", "KB", "MB"):
        if abs(count) < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def percent(share: float) -> str:
    """Format a share, as in ``41%``; only 0 is written as 0%, and only 1 as 100%."""
    if 0.995 <= share < 1:
        return "over 99%"
    return f"{100 * share:.0f}%" if share >= 0.1 or not share else f"{100 * share:.2g}%"


def module_text(name: str | None) -> str:
    """Return the name of a module, as text."""
    if name is None:
        return "outside of the model's modules"
    return name or "the model"


def times_text(count: int) -> str:
    """Format a number of times, as in ``3 times``."""
    return "once" if count == 1 else f"{count:,} times"


_PATTERNS = {"bfloat16": "d0", "float16": "d1", "float32": "d2", "float64": "d3"}
_OTHER = "d4"
_RULES = {"none": "no rule"}


def duration(seconds: float) -> str:
    """Format seconds, as in ``1.5 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"


def pattern(dtype: str) -> str:
    """Return the CSS class of a dtype."""
    return _PATTERNS.get(dtype, _OTHER)


def in_order(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return counts by dtype in the order of the bars."""
    return sorted(counts.items(), key=lambda each: pattern(each[0]))


def ruled(decided: Op | Decision) -> str:
    """Format the rule that decided."""
    return " ".join(filter(None, (_RULES.get(decided.rule, decided.rule), decided.rule_name)))


_MAX_OPS = 20
_MAX_FINDINGS = 8
_MAX_PLACES = 3
_MAX_LOW_BIT = 8
_MAX_RULES = 8
_MAX_MATMULS = 10
_MIN_SHARE = 0.01
"""The smallest share of the matmuls' operations that has a line."""
_LONGEST_NAME = 60
_LONGEST_LINE = 400
_WIDTH = 120
_FIRST_LEFT_OUT = ("by", "bytes", "outputs", "policy", "pass", "casts", "time")
"""The columns that a table lacks where it would be too wide, in the order in which they are left out."""
_SHORT = {"backend's table": "table", "autocast is off": "off"}


def run_text(facts: Facts, width: int = sys.maxsize) -> str:
    """Return lines on the run, wrapped to a width."""
    run, total = facts.run, facts.total
    what = ", ".join(f"{device} in {' and '.join(dtypes)}" for device, dtypes in run.devices.items()) or "no region"
    outside = facts.outside_time_share
    cast = (
        f"{total.casts:,} casts, {total.cast_bytes:,} bytes; cast cache: {total.hits:,} hits, {total.misses:,} misses"
    )
    lines = [
        f"{what}; {run.engine} engine, {run.seconds:.2f} s",
        f"in a fast dtype: {', '.join(fast_shares(facts))}" if facts.fast_share is not None else "",
        f"outside of regions: {percent(outside)} of the time in ops" if outside else "",
        cast + (f"; {total.cast_seconds:.3f} s of casting" if run.timing else ""),
    ]
    return "\n".join(_wrapped(_cut(line, _LONGEST_LINE), width) for line in lines if line)


def fast_shares(facts: Facts) -> list[str]:
    """Return the shares of the run in a fast dtype, as text: of the time and of the matmuls, else of the calls."""
    time, flops, calls = facts.fast_time_share, facts.fast_flops_share, facts.fast_share
    shares = [] if time is None else [f"{percent(time)} of the time in ops"]
    shares += [] if flops is None else [f"{percent(flops)} of the {flops_text(sum(facts.flops.values()))} in matmuls"]
    return shares or ([] if calls is None else [f"{percent(calls)} of the floating-point ops"])


def op_table(facts: Facts, width: int = sys.maxsize) -> tuple[list[str], list[list[str]]]:
    """Return the names of columns, and a row for each of the first ops; of the columns, those that fit a width."""
    rows = []
    for op in _called(facts)[:_MAX_OPS]:
        rule = f"{op.rule} {op.rule_name!r}" if op.rule_name else _SHORT.get(op.rule, op.rule)
        cells = [op.op.removeprefix("aten::"), op.phase, f"{op.calls:,}", duration(op.time).replace("µ", "u")]
        cells += [op.policy or "", rule, ", ".join(op.input_dtypes), ", ".join(op.output_dtypes)]
        cells += [f"{op.casts:,}" if op.casts else "-", size(op.cast_bytes) if op.cast_bytes else "-"]
        rows.append([_cut(cell, min(_LONGEST_NAME, width // 2)) for cell in cells])
    names = ["op", "pass", "calls", "time", "policy", "by", "inputs", "outputs", "casts", "bytes"]
    columns = {column[0]: column for column in zip(names, *rows, strict=True)}
    if not facts.run.timing:
        del columns["time"]
    for name in _FIRST_LEFT_OUT:
        if sum(max(map(len, column)) + 3 for column in columns.values()) > width + 1:
            columns.pop(name, None)
    names, *rows = map(list, zip(*columns.values(), strict=True))
    return names, rows


def lines_of(facts: Facts, findings: Iterable[Finding], width: int = sys.maxsize) -> list[str]:
    """Return the lines below the table: the other ops, the recipes, the rules and the findings."""
    outside, others = facts.outside, len(facts.ops) - len(facts.outside) - len(_called(facts)[:_MAX_OPS])
    (shown, _), (every, _) = op_table(facts, width), op_table(facts)
    left_out = [name for name in every if name not in shown]
    lines = [f"left out to fit the width: {', '.join(left_out)}"] if left_out else []
    lines += [f"... and {others:,} more, inner ops included: see seen.ops or an HTML report"] if others else []
    lines += [f"ops outside of regions: {outside_text(outside).replace('µ', 'u')}"] if outside else []
    lines += matmul_lines(facts.matmuls)
    lines += _bounded(recipe_lines(facts.low_bit), _MAX_LOW_BIT, "seen.low_bit")
    lines += _bounded(_rule_lines(facts), _MAX_RULES, "seen.modules")
    lines = [_wrapped(_cut(line, _LONGEST_LINE), width) for line in lines]
    groups = grouped(findings)
    if groups:
        found = [_cut(_finding_line(*each), 2 * _LONGEST_LINE) for each in with_remedies_once(groups)]
        wrapped = (_wrapped(line, min(width, _WIDTH)) for line in found)
        lines += ["", "Findings", *_bounded(wrapped, _MAX_FINDINGS, "seen.findings")]
    return lines


def outside_text(ops: Sequence[Op]) -> str:
    """Return the calls and the time of ops, and the names of the first, which may be those of an optimizer."""
    calls, seconds = sum(op.calls for op in ops), sum(op.time for op in ops)
    names = ", ".join(op.op.removeprefix("aten::") for op in ops[:_MAX_PLACES])
    more = ", ..." if len(ops) > _MAX_PLACES else ""
    return f"{calls:,} calls{f', {duration(seconds)}' if seconds else ''}: {names}{more}"


def _called(facts: Facts) -> list[Op]:
    """Return the ops that the program called itself or that have a policy, without those outside of regions."""
    return [op for op in facts.ops if not op.is_inner and not (facts.run.devices and op.is_outside)]


def _rule_lines(facts: Facts) -> Iterator[str]:
    """Yield a line for each rule of modules."""
    modules: dict[str, list[str]] = {}
    for each in facts.modules:
        if each.rule:
            modules.setdefault(each.rule, []).append(_cut(module_text(each.module), _LONGEST_NAME))
    for rule, names in modules.items():
        more = len(names) - _MAX_PLACES
        yield f"rule {rule} in {', '.join(names[:_MAX_PLACES])}{f' and {more:,} more modules' if more > 0 else ''}"


def _finding_line(group: Sequence[Finding], remedy: str) -> str:
    """Return a line for findings with one remedy: the first one, and where the others are."""
    first, others = group[0], group[1:]
    places = [_cut(finding.where, _LONGEST_NAME) for finding in others[:_MAX_PLACES]]
    more = len(others) - len(places)
    also = f" The same in {', '.join(places)}{f' and {more:,} more places' if more else ''}." if places else ""
    return f"- {_cut(first.where, _LONGEST_NAME)}: {_cut(first.what, _LONGEST_LINE)}{also} {remedy}"


def _bounded(lines: Iterable[str], most: int, see: str) -> list[str]:
    shown = list(lines)
    more = len(shown) - most
    return [*shown[:most], *([f"... and {more:,} more: see {see}"] if more > 0 else ())]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


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
    yield f"{shares} of the {flops_text(total)} in matmuls"
    others = list(_others(matmuls))
    large = [(flops, text) for flops, text in others if flops >= _MIN_SHARE * total][:_MAX_MATMULS]
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


def flops_text(number: float) -> str:
    """Format floating-point operations, as in ``1.5 GFLOPs``."""
    units = iter(("", "k", "M", "G", "T", "P"))
    unit = next(units)
    while number >= 1000 and unit != "P":
        number, unit = number / 1000, next(units)
    return f"{number:.3g} {unit}FLOPs"


def recipe_lines(records: Iterable[LowBit]) -> Iterable[str]:
    """Yield a line of text for each record."""
    for record in records:
        op = record.op.removeprefix("aten::")
        if record.declined:
            yield f"{record.recipe} on {record.device}: {op} declined {times_text(record.calls)}: {record.declined}"
        else:
            by = "" if record.package in ("", "polycast") else f" by {record.package}"
            yield f"{record.recipe} on {record.device}: {op} computed {times_text(record.calls)}{by}"


def headline(facts: Facts, findings: Iterable[Finding]) -> str:
    """Return the share of the run in a fast dtype, the casts, and the kinds of findings, in a line."""
    return "; ".join(_headline_parts(facts, findings))


def _headline_parts(facts: Facts, findings: Iterable[Finding]) -> Iterator[str]:
    fast = " and ".join(dict.fromkeys(dtype for dtypes in facts.run.devices.values() for dtype in dtypes))
    if facts.fast_share is None or not fast:
        yield f"{facts.total.calls:,} calls of ops, no region was enabled" if facts.ops else "no op ran"
    else:
        yield f"{fast_shares(facts)[0]} in {fast}"
    yield f"{facts.total.casts:,} casts of {size(facts.total.cast_bytes)}"
    found = Counter(finding.kind.replace("_", " ") for finding in findings)
    each = (f"{kind} ({count} places)" if count > 1 else kind for kind, count in found.items())
    yield f"findings: {', '.join(each)}" if found else "no findings"
