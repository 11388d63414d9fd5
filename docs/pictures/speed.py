"""Time of models in float32, under torch.autocast, as a bfloat16 copy, and on polycast."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from .. import tables
from .svg import Picture

README = Path(__file__).parent.parent.parent / "README.md"
_IN_README = re.compile(r"!\[[^\]]*\]\(docs/speed\.svg\)")
BENCHMARK = "fastest"
MODELS = {
    "LLaMA 1.1 B, 1 token": "LLaMA of 1.1 billion weights, decoding a token",
    "GPT-2 small, 1 token": "GPT-2 small, decoding a token",
    "GPT-2 small, 128 tokens": "GPT-2 small, 128 tokens at once",
    "BERT base, 4 x 128 tokens": "BERT base, 4 x 128 tokens",
}


class Bar(NamedTuple):
    """A way to run a model: its name, and the kind of its bar."""

    name: str
    kind: str


BARS = {
    "float32": Bar("float32", "warm"),
    "torch.autocast": Bar("torch.autocast", "other"),
    "a bfloat16 copy": Bar("a bfloat16 copy", "copy"),
    "WeightCache": Bar("polycast, WeightCache", "ours"),
    "fastest, WeightCache": Bar("polycast, fastest, WeightCache", "ours"),
    "int8": Bar("polycast, int8", "ours"),
}


def times(results: list[dict[str, Any]], model: str) -> dict[str, float | None]:
    """Return the time of each way relative to float32; None if it was left out."""
    measured = {each["what"]: each["measured"] for each in results if each["against"] == "float32"}
    return {way: 1.0 if way == "float32" else measured[f"{model}, {way}"] for way in BARS}


def threads_of(run: dict[str, Any]) -> int:
    """Return the number of threads whose times are shown: two, if they were measured."""
    numbers = sorted({each["threads"] for each in run["results"]})
    return 2 if 2 in numbers else int(numbers[-1])


def _machine(run: dict[str, Any], threads: int) -> str:
    """Return the machine, the settings and the command of the measurement."""
    about, quick = run["environment"], " --quick" if run["quick"] else ""
    command = f'make bench BENCH="--save --only {BENCHMARK}{quick}"'
    number = f"{threads} thread{'s' * (threads > 1)}"
    return f"{about['cpu']}, {about['cores']} cores, {number}, torch {about['torch']}; {command}"


def draw() -> Picture:
    """Draw bars of the times, relative to float32."""
    run = tables.run_of(BENCHMARK)
    threads = threads_of(run)
    results = [each for each in run["results"] if each["threads"] == threads]
    groups = {title: times(results, model) for model, title in MODELS.items()}
    described = "; ".join(
        f"{title}: {', '.join(f'{BARS[way].name} {_number(time)}' for way, time in by_way.items())}"
        for title, by_way in groups.items()
    )
    height, top = 56 + 24 * len(BARS), 62
    bottom = top + height * len(groups)
    picture = Picture(
        760,
        bottom + 24,
        "Time in float32, under torch.autocast, of a bfloat16 copy, and on polycast",
        f"Time, where float32 takes 1. {described}.",
    )
    picture.text(24, 34, "Time, float32 = 1", "bold", size=16)
    picture.text(736, 34, "less is better", "quiet", size=12, anchor="end")
    left, full = 228, 440 / max(1.0, *(time or 0 for by_way in groups.values() for time in by_way.values()))
    for number, (title, by_way) in enumerate(groups.items()):
        y = top + height * number
        picture.text(24, y + 10, title, "bold", size=13)
        for place, (way, time) in enumerate(by_way.items()):
            row = y + 22 + 24 * place
            length = full * (time or 0)
            picture.text(left - 12, row + 13, BARS[way].name, "quiet", size=12.5, anchor="end")
            picture.box(left, row, length, 17, BARS[way].kind, radius=3)
            picture.text(left + length + 8, row + 13, _number(time), "bold", size=12.5)
    picture.text(24, bottom + 6, _machine(run, threads), "quiet", size=11)
    return picture


def _number(time: float | None) -> str:
    return "left out" if time is None else f"{time:.2f}"


def described(readme: str) -> str:
    """Return the README with the current description of the picture."""
    description = re.search(r"<desc[^>]*>(.*)</desc>", str(draw()))
    assert description is not None
    return _IN_README.sub(lambda _: f"![{description[1]}](docs/speed.svg)", readme)
