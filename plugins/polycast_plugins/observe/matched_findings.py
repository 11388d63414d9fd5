"""Find casts by MATCH that take time, or that overflow in the dtype of the tensor that an op writes to."""

import functools
from collections.abc import Iterable, Iterator

from polycast import CastPolicy

from .facts import Facts, add
from .finding import Finding
from .records import Cast
from .remedies import FLOAT32_RANGE, writes
from .text import module_text, size, times_text

_LARGE_CAST = 1 << 16
"""The size in bytes from which copying them takes longer than the overhead of a cast."""


def is_matched(cast: Cast) -> bool:
    """Return whether MATCH cast tensors."""
    return cast.policy == CastPolicy.MATCH.value and cast.count > 0


def matched_dtypes(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each op, module, source and target dtype with large casts by MATCH."""
    alike: dict[tuple[str, str | None, str, str], list[Cast]] = {}
    for cast in facts.casts:
        if is_matched(cast):
            alike.setdefault((cast.op, cast.module, cast.source, cast.target), []).append(cast)
    for (op, module, source, target), casts in alike.items():
        total = functools.reduce(add, casts)
        if total.bytes < _LARGE_CAST * total.count:
            continue
        yield Finding(
            "matched_dtypes",
            module_text(module),
            f"torch would refuse the dtypes of the inputs of {op}, so those in {source} are cast to {target}, "
            f"{times_text(total.count)}: {size(total.bytes)} cast.",
            _remedy(op, {dtype for each in facts.ops if each.op == op for dtype in each.input_dtypes}, source, target),
            module=module,
            ops=(op,),
            count=total.count,
            bytes=total.bytes,
            bytes_per_second=total.bytes / facts.run.seconds if facts.run.seconds > 0 else 0.0,
        )


def _remedy(op: str, dtypes: set[str], source: str, target: str) -> str:
    """Return what to do about casts of an op's inputs from `source` to `target`; `dtypes` are those of all inputs."""
    if writes(op):
        return f"Create the tensor that it writes in {source}, or the values in {target}."
    if dtypes == {source}:
        return f"Leave it, or create its inputs in {target}: torch has no kernel for {source}."
    if "norm" in op:
        return f"Convert the weights of its module to {target}: `module.float()`."
    return f"Create all its inputs in one dtype: {target} or {source}."


def narrowed_from(casts: Iterable[Cast], op: str, module: str | None, phase: str, target: str) -> list[str]:
    """Return the dtypes from which MATCH cast inputs of an op to `target`, if that has less range than float32."""
    if target in FLOAT32_RANGE:
        return []
    of_op = (each for each in casts if (each.op, each.module, each.phase, each.target) == (op, module, phase, target))
    return sorted({each.source for each in of_op if is_matched(each)})


def match_text(sources: Iterable[str], target: str) -> str:
    """Return a sentence on casts from `sources` to the dtype of the tensor that an op writes to; empty if none."""
    cast = " and ".join(sources)
    return f" Its inputs in {cast} are cast to {target}, the dtype of the tensor that it writes." if cast else ""
