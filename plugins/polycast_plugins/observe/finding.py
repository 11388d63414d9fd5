"""`Finding`, and findings with one remedy together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .records import in_ascii


@dataclass(frozen=True)
class Finding:
    """A finding: something that costs time or accuracy.

    Attributes:
        kind: ``"weights_cast_again"``, ``"round_trip"``, ``"float32_by_one_input"``, ``"unlisted_float32_op"``,
            ``"nonfinite"``, ``"overflow"``, ``"underflow"``, ``"slow_dtype"``, ``"disabled_region"``,
            ``"unused_region"``, ``"loss_in_fast_dtype"``, ``"recipe_in_training"`` or ``"matched_dtypes"``.
        where: the module, line of the program or device, as text.
        what: what was found, with numbers.
        remedy: what to do.
        module: the module, if the finding is about one.
        ops: the ops, if it is about some.
        count: how often.
        bytes, bytes_per_second: what casts wrote because of it, in all and by the observed seconds.
    """

    kind: str
    where: str
    what: str
    remedy: str
    module: str | None = None
    ops: tuple[str, ...] = ()
    count: int = 0
    bytes: int = 0
    bytes_per_second: float = 0.0

    def __str__(self) -> str:
        return in_ascii(f"{self.where}: {self.what} {self.remedy}")


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, ...]]:
    """Return findings grouped by kind and remedy, the costliest of each group first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.remedy), []).append(finding)
    return [tuple(sorted(group, key=lambda finding: -finding.bytes)) for group in groups.values()]


def with_remedies_once(groups: Iterable[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield each group of findings with its remedy or, if an earlier one has given that, a reference."""
    given: dict[str, str] = {}
    for group in groups:
        remedy, title = group[0].remedy, group[0].kind.replace("_", " ")
        codes = remedy.split("`")[1::2] or [remedy]
        known = [given[code] for code in codes if code in given]
        yield group, f"As for {known[0]}." if len(known) == len(codes) else remedy
        given = dict.fromkeys(codes, title) | given
