"""A summary of the report that `Observation.to_html` writes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from polycast_plugins.observe import Observation
from polycast_plugins.observe.text import duration, size

from .svg import Picture

FILE = Path(__file__).parent.parent / "figures" / "observation.json"
_ROWS = 12


def _bar(picture: Picture, x: float, y: float, width: float, dtypes: Mapping[str, float]) -> None:
    fast, total = dtypes.get("bfloat16", 0), sum(dtypes.values())
    picture.box(x, y, width, 10, "track", radius=3)
    picture.box(x, y, width * fast / total, 10, "ours")
    picture.box(x + width * fast / total, y, width * (total - fast) / total, 10, "warm")


def _lines(words: str, length: int) -> Iterator[str]:
    """Break a text into lines."""
    line = ""
    for word in words.split():
        if len(line) + len(word) >= length:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def draw() -> Picture:
    """Draw the run's numbers, its findings, and the tree of its modules."""
    seen = Observation.load(FILE)
    share = seen.fast_time_share
    assert share is not None
    shown = [module for module in seen.modules if module.module.count(".") < 3][:_ROWS]
    kinds = {finding.kind: finding for finding in reversed(seen.findings)}
    findings = [kinds[kind] for kind in ("weights_cast_again", "float32_by_one_input", "round_trip")]
    height = 344 + 26 * len(shown)
    picture = Picture(
        860,
        height,
        f"The report of a run of {seen.run.model}",
        f"{share:.0%} of the time in ops was in bfloat16, with {seen.total.casts} casts. Findings: "
        + " ".join(f"{finding.where}: {finding.what}" for finding in findings),
    )
    picture.text(24, 32, "polycast report", "accent bold", size=12)
    picture.text(24, 60, seen.run.model or "", "bold", size=22)
    _bar(picture, 24, 78, 380, seen.total.seconds)
    by_dtype = ", ".join(f"{dtype} {duration(seconds)}" for dtype, seconds in seen.total.seconds.items() if dtype)
    picture.text(24, 106, by_dtype, "quiet", size=12)
    numbers = (
        ("of the time fast", f"{share:.0%}"),
        ("op calls", f"{seen.total.calls:,}"),
        ("casts", f"{seen.total.casts}"),
        ("bytes cast", size(seen.total.cast_bytes)),
    )
    for place, (name, number) in enumerate(numbers):
        picture.text(440 + 104 * place, 84, number, "bold", size=17)
        picture.text(440 + 104 * place, 104, name, "quiet", size=11.5)
    for place, finding in enumerate(findings):
        x = 24 + 274 * place
        picture.box(x, 126, 264, 172, "panel", radius=6)
        picture.box(x, 126, 4, 172, "warm")
        picture.text(x + 16, 147, finding.kind.replace("_", " ").capitalize(), "bold", size=13)
        what, remedy = list(_lines(finding.what, 40)), list(_lines(finding.remedy.replace("`", ""), 40))
        for number, line in enumerate([*what, *remedy]):
            kind, gap = ("", 0) if number < len(what) else ("quiet", 8)
            picture.text(x + 16, 167 + 16 * number + gap, line, kind, size=11.5)
    for x, name, anchor in (
        (24, "module", "start"),
        (310, "computes in", "start"),
        (710, "casts", "end"),
        (836, "bytes cast", "end"),
    ):
        picture.text(x, 324, name, "quiet", size=11.5, anchor=anchor)
    picture.line(24, 332, 836, 332)
    for number, module in enumerate(shown):
        y = 352 + 26 * number
        depth = module.module.count(".") + 1 if module.module else 0
        name = module.module.rpartition(".")[2] or module.kind
        picture.text(24 + 18 * depth, y, name, "mono bold", size=12.5)
        if module.module:
            picture.text(24 + 18 * depth + 8 * len(name) + 10, y, module.kind, "quiet", size=12)
        _bar(picture, 310, y - 9, 200, module.total.compute_dtypes)
        dtypes = ", ".join(f"{dtype} {count}" for dtype, count in sorted(module.total.compute_dtypes.items()))
        picture.text(520, y, dtypes, "quiet", size=10.5)
        picture.text(710, y, f"{module.total.casts}", size=12, anchor="end")
        picture.text(836, y, size(module.total.cast_bytes), size=12, anchor="end")
    return picture
