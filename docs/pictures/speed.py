"""Times of models in every way to run them: bars of some, and all cases in which a plain region gains nothing."""

import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import tables
from .svg import Picture

README = Path(__file__).parent.parent.parent / "README.md"
_IN_README = re.compile(r"!\[[^\]]*\]\(docs/(?P<name>llama|speed)\.svg\)")
BENCHMARK, GPU, LLAMA = "fastest", "gpu", "llama-cpp"
FLOAT32, TORCH, PLAIN, AGAIN = "float32", "torch.autocast", "a plain region", "float32, in torch.autocast's process"
MODELS = {
    "LLaMA 1.1 B, 1 token": "LLaMA of 1.1 billion weights, decoding a token",
    "GPT-2 small, 1 token": "GPT-2 small, decoding a token",
    "GPT-2 small, 128 tokens": "GPT-2 small, 128 tokens at once",
    "BERT base, 4 x 128 tokens": "BERT base, 4 x 128 tokens",
}
ON_GPU = {
    "LLaMA 1.1 B, 2,048 tokens": "LLaMA of 1.1 billion weights, 2,048 tokens at once",
    "GPT-2 small, 1 token": "GPT-2 small, decoding a token",
    "BERT base, 32 x 128 tokens": "BERT base, 32 x 128 tokens",
    "BERT base, training step of 32 x 128 tokens": "BERT base, training step of 32 x 128 tokens",
}
ON_LLAMA_CPP = {
    "1 token": "LLaMA of 1.1 billion weights, decoding a token",
    "1 token after 2,048": "The same after 2,048 tokens",
    "128 tokens": "128 tokens at once",
}
GAIN = 0.98
"""A plain region gains nothing where it takes at least this part of the time of the faster of float32 and
torch.autocast."""

_LINE = 17
"""The distance of lines in the footer."""


class Bar(NamedTuple):
    """A way to run a model: its name, and the kind of its bar."""

    name: str
    kind: str


BARS = {
    FLOAT32: Bar("float32", "warm"),
    TORCH: Bar("torch.autocast", "other"),
    "a bfloat16 copy": Bar("bfloat16 copy", "copy"),
    "a float16 copy": Bar("float16 copy", "copy"),
    PLAIN: Bar("polycast, plain region", "ours"),
    "WeightCache": Bar("polycast, WeightCache", "ours"),
    "fastest, WeightCache": Bar("polycast, fastest + cache", "ours"),
    "BF16": Bar("llama.cpp, BF16", "other"),
    "Q8_0": Bar("llama.cpp, Q8_0", "other"),
    "int8": Bar("polycast, int8", "ours"),
    "Q4_0": Bar("llama.cpp, Q4_0", "other"),
    "int4": Bar("polycast, int4", "ours"),
}


class Time(NamedTuple):
    """A time relative to the base's: the least, and that of nine turns in ten, None in figures without it."""

    least: float
    most: float | None = None


Times = Mapping[str, Time | None]
"""By way; None if it was left out."""


def threads_of(run: dict[str, Any]) -> int:
    """Return the number of threads whose times are shown: two, if they were measured."""
    numbers = sorted({each["threads"] for each in run["results"]})
    return 2 if 2 in numbers else int(numbers[-1])


def times(run: dict[str, Any], base: str = FLOAT32) -> dict[str, Times]:
    """Return the times of all cases relative to those of one way."""
    threads, seconds = threads_of(run), dict[str, dict[str, Time | None]]()
    for each in (each for each in run["results"] if each["threads"] == threads and each["sides"][0]):
        ours, theirs = each["sides"]
        of_case = seconds.setdefault(each["what"].removesuffix(f", {ours}"), {})
        if each["times"] is None:
            of_case[ours] = None
            continue
        spread, (least, of_other) = each.get("spread"), each["times"]
        of_case[ours] = Time(least, spread[1] * of_other if spread else None)
        of_case.setdefault(theirs, Time(of_other))
    return {
        case: {
            way: each and Time(each.least / unit.least, each.most and each.most / unit.least)
            for way, each in of.items()
        }
        for case, of in seconds.items()
        if (unit := of.get(base))
    }


def number(time: Time | None) -> str:
    """Return the time as text."""
    return "left out" if time is None else f"{time.least:.2f}"


def without_gain(by_case: Mapping[str, Times]) -> list[tuple[float, str]]:
    """Return the cases in which a plain region gains nothing, and its time relative to the faster other way."""
    found = []
    for case, of in by_case.items():
        others = [each.least for each in (of[FLOAT32], of[TORCH]) if each is not None]
        plain = of[PLAIN]
        if plain is None or plain.least >= GAIN * min(others):
            found.append((math.inf if plain is None else plain.least / min(others), case))
    return sorted(found, reverse=True)


def _footer(benchmark: str, mark: str) -> list[str]:
    """Return lines with what the marks mean, and the machine, the settings and the command of the measurement."""
    run = tables.run_of(benchmark)
    if any(each.get("spread") for each in run["results"]):
        mark += " Line: up to the time of nine turns in ten."
    texts = mark, f"{tables.machine(run, threads_of(run))};", tables.command([benchmark]).strip("`")
    return [line for text in texts for line in textwrap.wrap(text, 70)]


def _write(picture: Picture, y: float, footer: list[str]) -> None:
    for place, line in enumerate(footer):
        picture.text(16, y + _LINE * place, line, "quiet", size=13)


def _bars(benchmark: str, cases: Mapping[str, str], base: str) -> Picture:
    """Draw the bars of some cases."""
    found = times(tables.run_of(benchmark), base)
    groups = {title: {way: found[case][way] for way in BARS if way in found[case]} for case, title in cases.items()}
    described = "; ".join(
        f"{title}: {', '.join(f'{BARS[way].name} {number(time)}' for way, time in by_way.items())}"
        for title, by_way in groups.items()
    )
    top, rows = 56, sum(map(len, groups.values()))
    bottom = top + 42 * len(groups) + 20 * rows
    footer = _footer(benchmark, "Bar: the least time.")
    named = f"Time, where {base} takes 1"
    picture = Picture(
        540, bottom + 8 + _LINE * len(footer), f"{named}, of models in every way to run them", f"{named}. {described}."
    )
    picture.text(16, 30, f"Time, {base} = 1", "bold", size=16)
    picture.text(524, 30, "less is better", "quiet", size=13, anchor="end")
    ends = (end for by_way in groups.values() for time in by_way.values() if time for end in time if end)
    left, full, y = 186, 296 / max(1.0, *ends), top
    for title, by_way in groups.items():
        picture.text(16, y + 8, title, "bold", size=14)
        y += 20
        for way, time in by_way.items():
            picture.text(left - 10, y + 12, BARS[way].name, "quiet", size=13, anchor="end")
            end = full * time.least if time else 0
            picture.box(left, y, end, 15, BARS[way].kind, radius=2)
            if time and time.most:
                picture.line(left + end, y + 7.5, left + full * time.most, y + 7.5, "spread")
                end = full * time.most
            picture.text(left + end + 7, y + 12, number(time), "bold", size=13)
            y += 20
        y += 22
    _write(picture, bottom + 8, footer)
    return picture


def draw() -> Picture:
    """Draw the times of common models."""
    return _bars(BENCHMARK, MODELS, FLOAT32)


def draw_gpu() -> Picture:
    """Draw the times of models on a GPU."""
    return _bars(GPU, ON_GPU, TORCH)


def has_llama() -> bool:
    """Return whether llama.cpp was there when its benchmark was run."""
    return tables.has_results(LLAMA) and bool(times(tables.run_of(LLAMA)))


def draw_llama() -> Picture:
    """Draw the times of a LLaMA on llama.cpp, torch and polycast."""
    return _bars(LLAMA, ON_LLAMA_CPP, FLOAT32)


def draw_slower() -> Picture:
    """Draw the times of all cases in which a plain region gains nothing, on a logarithmic axis."""
    found = times(tables.run_of(BENCHMARK))
    cases = [case for _, case in without_gain(found)]
    ways = {TORCH: "other", PLAIN: "ours", "the best recipe": "good"}
    top, bottom = 78, 78 + 38 * len(cases)
    described = "; ".join(
        f"{case}: {', '.join(f'{BARS[way].name} {number(found[case][way])}' for way in (TORCH, PLAIN))}"
        for case in cases
    )
    title = "No faster than torch.autocast or float32"
    footer = _footer(BENCHMARK, "float32 = 1: less is better. Dot: the least time.")
    picture = Picture(
        540, bottom + 38 + _LINE * len(footer), title, f"{title}: time, where float32 takes 1. {described}."
    )
    picture.text(16, 30, f"{title}: {len(cases)} of {len(found)} cases", "bold", size=16)
    for place, (way, kind) in enumerate(ways.items()):
        picture.dot(22 + 180 * place, 50, kind)
        picture.text(32 + 180 * place, 54, BARS[way].name if way in BARS else way, "quiet", size=13)

    def x_of(value: float) -> float:
        return 270 + 72 * math.log2(min(max(value, 0.125), 9.0))

    ticks = (0.125, 0.25, 0.5, 1, 2, 4, 8)
    for tick in ticks:
        picture.text(x_of(tick), bottom + 16, f"{tick:g}", "quiet", size=13, anchor="middle")
    for place, case in enumerate(cases):
        y = top + 38 * place
        picture.text(16, y + 8, case, "", size=13)
        for tick in ticks:
            picture.line(x_of(tick), y + 13, x_of(tick), y + 27, "spread" if tick == 1 else "line")
        recipes = [each for way, each in found[case].items() if way.startswith(("fastest", "int8")) and each]
        marks = {TORCH: found[case][TORCH], PLAIN: found[case][PLAIN], "the best recipe": min(recipes)}
        for way, time in marks.items():
            if time is not None:
                picture.line(x_of(time.least), y + 20, x_of(time.most or time.least), y + 20, "spread")
                picture.dot(x_of(time.least), y + 20, ways[way])
    _write(picture, bottom + 38, footer)
    return picture


def described(readme: str) -> str:
    """Return the README with the current descriptions of its pictures."""
    return _IN_README.sub(lambda match: f"![{_description(match['name'])}](docs/{match['name']}.svg)", readme)


def _description(name: str) -> str:
    description = re.search(r"<desc[^>]*>(.*)</desc>", str({"llama": draw_llama, "speed": draw}[name]()))
    assert description is not None
    return description[1]
