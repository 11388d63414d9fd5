"""A summary of the report that `Observation.to_html` writes."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from polycast_plugins.observe import Observation
from polycast_plugins.observe.text import duration, size

from .svg import Picture

FILE = Path(__file__).parent.parent / "figures" / "observation.json"
_ROWS = 12
_LEFT, _RIGHT = 16, 524
_LETTERS = 68


def _bar(picture: Picture, x: float, y: float, width: float, dtypes: Mapping[str, float]) -> None:
    fast, total = dtypes.get("bfloat16", 0), sum(dtypes.values())
    picture.box(x, y, width, 10, "track", radius=3)
    picture.box(x, y, width * fast / total, 10, "ours")
    picture.box(x + width * fast / total, y, width * (total - fast) / total, 10, "warm")


def draw() -> Picture:
    """Draw the run's numbers, its findings, and the tree of its modules."""
    seen = Observation.load(FILE)
    share = seen.fast_time_share
    assert share is not None
    shown = [module for module in seen.modules if module.module.count(".") < 3][:_ROWS]
    kinds = {finding.kind: finding for finding in reversed(seen.findings)}
    findings = [kinds[kind] for kind in ("weights_cast_again", "float32_by_one_input", "round_trip")]
    texts = [
        (textwrap.wrap(each.what, _LETTERS), textwrap.wrap(each.remedy.replace("`", ""), _LETTERS)) for each in findings
    ]
    heights = [44 + 18 * (len(what) + len(remedy)) for what, remedy in texts]
    top = 176 + sum(heights) + 10 * len(heights)
    picture = Picture(
        540,
        top + 34 + 26 * len(shown),
        f"The report of a run of {seen.run.model}",
        f"{share:.0%} of the time in ops was in bfloat16, with {seen.total.casts} casts. Findings: "
        + " ".join(f"{finding.where}: {finding.what}" for finding in findings),
    )
    picture.text(_RIGHT, 34, "polycast report", "accent bold", size=13, anchor="end")
    picture.text(_LEFT, 34, seen.run.model or "", "bold", size=20)
    _bar(picture, _LEFT, 50, _RIGHT - _LEFT, seen.total.seconds)
    by_dtype = ", ".join(f"{dtype} {duration(seconds)}" for dtype, seconds in seen.total.seconds.items() if dtype)
    picture.text(_LEFT, 80, by_dtype, "quiet", size=13)
    numbers = (
        ("of the time fast", f"{share:.0%}"),
        ("op calls", f"{seen.total.calls:,}"),
        ("casts", f"{seen.total.casts}"),
        ("bytes cast", size(seen.total.cast_bytes)),
    )
    for place, (name, number) in enumerate(numbers):
        picture.text(_LEFT + 134 * place, 114, number, "bold", size=17)
        picture.text(_LEFT + 134 * place, 134, name, "quiet", size=13)
    y = 152
    for finding, (what, remedy), height in zip(findings, texts, heights, strict=True):
        picture.box(_LEFT, y, _RIGHT - _LEFT, height, "panel", radius=6)
        picture.box(_LEFT, y, 4, height, "warm")
        picture.text(_LEFT + 16, y + 22, finding.kind.replace("_", " ").capitalize(), "bold", size=14)
        for number, line in enumerate([*what, *remedy]):
            kind, gap = ("", 0) if number < len(what) else ("quiet", 4)
            picture.text(_LEFT + 16, y + 42 + 18 * number + gap, line, kind, size=13)
        y += height + 10
    for x, name, anchor in (
        (_LEFT, "module", "start"),
        (270, "computes in", "start"),
        (424, "casts", "end"),
        (_RIGHT, "bytes cast", "end"),
    ):
        picture.text(x, top, name, "quiet", size=13, anchor=anchor)
    picture.line(_LEFT, top + 8, _RIGHT, top + 8)
    for number, module in enumerate(shown):
        y = top + 28 + 26 * number
        depth = module.module.count(".") + 1 if module.module else 0
        name = module.module.rpartition(".")[2] or module.kind
        picture.text(_LEFT + 14 * depth, y, name, "mono bold", size=13)
        if module.module:
            picture.text(_LEFT + 14 * depth + 8 * len(name) + 10, y, module.kind, "quiet", size=13)
        _bar(picture, 270, y - 9, 100, module.total.compute_dtypes)
        picture.text(424, y, f"{module.total.casts}", size=13, anchor="end")
        picture.text(_RIGHT, y, size(module.total.cast_bytes), size=13, anchor="end")
    return picture
