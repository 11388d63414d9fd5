"""How long a model takes: on polycast, under torch.autocast, and as a copy of it in bfloat16."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from .svg import Picture

FIGURES = Path(__file__).parent.parent / "figures"


class Shown(NamedTuple):
    """What is shown of a comparison: its title, and how polycast's side and the others are called in the results."""

    title: str
    what: str
    torch: str
    copy: str


_TOKEN, _LAYERS = "GPT-2 small, 1 token, WeightCache, trainable", "8 x Linear(2048, 2048), batch 1, WeightCache"
SHOWN = (
    Shown("GPT-2 small, decoding a token", _TOKEN, "torch.autocast", "a bfloat16 copy"),
    Shown("8 x Linear(2048, 2048), batch 1", _LAYERS, "torch.autocast", "a bfloat16 copy"),
    Shown("GPT-2 small, decoding a token, compiled", _TOKEN, "compiled torch", "compiled bfloat16"),
)


def results() -> list[dict[str, Any]]:
    """Return what `make bench` measured, of every file that is kept."""
    files = sorted(FIGURES.glob("bench-*.json"))
    return [result for file in files for result in json.loads(file.read_text(encoding="utf-8"))["results"]]


def machine() -> str:
    """Return where it was measured, in a line."""
    said = json.loads((FIGURES / "bench-models.json").read_text(encoding="utf-8"))
    about, quick = said["environment"], ", fewer repeats (--quick)" if said["quick"] else ""
    return f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}{quick}"


def draw() -> Picture:
    """Return bars of the time that each takes, torch.autocast's being 1."""
    measured = {(result["what"], result["against"]): result["measured"] for result in results()}
    groups = []
    for shown in SHOWN:
        ours = measured[shown.what, shown.torch]
        groups.append((shown.title, ours, ours / measured[shown.what, shown.copy]))
    said = (f"{title}: polycast {ours:.2f}, a bfloat16 copy {copy:.2f}" for title, ours, copy in groups)
    picture = Picture(
        760,
        64 + 116 * len(groups) + 22,
        "Time on polycast, under torch.autocast and of a bfloat16 copy",
        f"Time, where torch.autocast takes 1. {'; '.join(said)}.",
    )
    picture.text(24, 34, "Time, torch.autocast = 1", "bold", size=16)
    picture.text(736, 34, "less is better", "quiet", size=12, anchor="end")
    left, full = 210, 380
    for number, (title, ours, copy) in enumerate(groups):
        y = 62 + 116 * number
        picture.text(24, y + 10, title, "bold", size=13)
        rows = (
            ("polycast, WeightCache", "ours", ours, f"{1 / ours:.1f} times as fast"),
            ("torch.autocast", "other", 1.0, ""),
            ("a bfloat16 copy", "copy", copy, "without float32 weights"),
        )
        for place, (name, kind, time, note) in enumerate(rows):
            top = y + 22 + 26 * place
            picture.text(left - 12, top + 14, name, "quiet", size=12.5, anchor="end")
            picture.box(left, top, full * time, 18, kind, radius=3)
            picture.text(left + full * time + 8, top + 14, f"{time:.2f}", "bold", size=12.5)
            picture.text(left + full * time + 44, top + 14, note, "quiet", size=12)
    picture.text(24, 64 + 116 * len(groups) + 6, machine(), "quiet", size=11.5)
    return picture
