"""Time of a model on polycast, under torch.autocast, as a bfloat16 copy, and in float32."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from .. import tables
from .svg import Picture

README = Path(__file__).parent.parent.parent / "README.md"
_IN_README = re.compile(r"!\[[^\]]*\]\(docs/speed\.svg\)")


class Shown(NamedTuple):
    """A comparison: its title, its benchmark, and the names of the sides in the results."""

    title: str
    benchmark: str
    what: str
    torch: str
    copy: str
    float32: str


_TOKEN, _LAYERS = "GPT-2 small, 1 token, WeightCache", "8 x Linear(2048, 2048), batch 1, WeightCache"
_EAGER, _COMPILED = ("torch.autocast", "a bfloat16 copy", "float32"), ("torch", "bfloat16", "float32")
SHOWN = (
    Shown("GPT-2 small, decoding a token", "gpt2", f"{_TOKEN}, trainable", *_EAGER),
    Shown("8 x Linear(2048, 2048), batch 1", "linears", _LAYERS, *_EAGER),
    Shown(
        "GPT-2 small, decoding a token, compiled", "compiled", _TOKEN, *(f"compiled {against}" for against in _COMPILED)
    ),
)


def _times(shown: Shown) -> tuple[float, float, float]:
    """Return the times of polycast, a bfloat16 copy and float32 relative to torch.autocast, on the most threads."""
    results: list[dict[str, Any]] = tables.run_of(shown.benchmark)["results"]
    most = max(result["threads"] for result in results)
    measured = {(each["what"], each["against"]): each["measured"] for each in results if each["threads"] == most}
    ours = measured[shown.what, shown.torch]
    return ours, ours / measured[shown.what, shown.copy], ours / measured[shown.what, shown.float32]


def _machine() -> str:
    """Return the machine and the settings of the measurement."""
    run = tables.run_of(SHOWN[0].benchmark)
    about, quick = run["environment"], ", fewer repeats (--quick)" if run["quick"] else ""
    threads = max(result["threads"] for result in run["results"])
    return f"{about['cpu']}, {threads} threads, torch {about['torch']}{quick}"


def draw() -> Picture:
    """Draw bars of the measured times, relative to torch.autocast."""
    groups = [(shown.title, *_times(shown)) for shown in SHOWN if tables.has_results(shown.benchmark)]
    comparisons = (
        f"{title}: polycast {ours:.2f}, a bfloat16 copy {copy:.2f}, float32 {float32:.2f}"
        for title, ours, copy, float32 in groups
    )
    height = 142
    picture = Picture(
        760,
        64 + height * len(groups) + 22,
        "Time on polycast, under torch.autocast, of a bfloat16 copy and in float32",
        f"Time, where torch.autocast takes 1. {'; '.join(comparisons)}.",
    )
    picture.text(24, 34, "Time, torch.autocast = 1", "bold", size=16)
    picture.text(736, 34, "less is better", "quiet", size=12, anchor="end")
    left, full = 210, 380 / max(1.0, *(time for _, *times in groups for time in times))
    for number, (title, ours, copy, float32) in enumerate(groups):
        y = 62 + height * number
        picture.text(24, y + 10, title, "bold", size=13)
        rows = (
            ("polycast, WeightCache", "ours", ours, f"{1 / ours:.1f} times as fast"),
            ("torch.autocast", "other", 1.0, ""),
            ("a bfloat16 copy", "copy", copy, "without float32 weights"),
            ("float32", "warm", float32, "without autocast"),
        )
        for place, (name, kind, time, note) in enumerate(rows):
            top = y + 22 + 26 * place
            picture.text(left - 12, top + 14, name, "quiet", size=12.5, anchor="end")
            picture.box(left, top, full * time, 18, kind, radius=3)
            picture.text(left + full * time + 8, top + 14, f"{time:.2f}", "bold", size=12.5)
            picture.text(left + full * time + 44, top + 14, note, "quiet", size=12)
    picture.text(24, 64 + height * len(groups) + 6, _machine(), "quiet", size=11.5)
    return picture


def described(readme: str) -> str:
    """Return the README with the current description of the picture."""
    description = re.search(r"<desc[^>]*>(.*)</desc>", str(draw()))
    assert description is not None
    return _IN_README.sub(lambda _: f"![{description[1]}](docs/speed.svg)", readme)
