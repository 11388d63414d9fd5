"""Write what the README and docs/benchmarks.md say about figures, from docs/figures/bench."""

import re
import statistics
from typing import Any

from . import tables
from .pictures import speed

PAGES = (speed.README, tables.DOCS / "benchmarks.md", tables.DOCS / "serve.md")
_BETWEEN = re.compile(r"(?<=<!-- figure of )(?P<name>\w+): make docs -->\n.*?(?=<!-- end -->)", re.DOTALL)


def sentences() -> dict[str, str]:
    """Return each sentence by its name."""
    run = tables.run_of(speed.BENCHMARK)
    found = speed.times(run)
    cases = (found["BERT base, 4 x 128 tokens"], speed.times(tables.run_of(speed.LLAMA))["1 token"])
    bert, llama = ({way: speed.number(time) for way, time in of.items()} for of in cases)
    threads, slower = speed.threads_of(run), len(speed.without_gain(found))
    where = f"{run['environment']['cpu']}, {threads} thread{'s' * (threads > 1)}"
    return {
        "region": f"BERT base, 4 x 128 tokens, takes **{bert[speed.PLAIN]}** of float32's time in a plain region and "
        f"{bert[speed.TORCH]} under `torch.autocast` ({where}). In {slower} of {len(found)} cases a plain region is "
        "[no faster](docs/benchmarks.md#where-a-region-is-no-faster) than the faster of float32 and `torch.autocast`.",
        "gain": f"On a CPU, BERT takes **{bert[speed.PLAIN]}** of float32's time in a region, and {bert['int8']} with "
        f"int8; a LLaMA of 1.1 billion weights decodes a token in **{llama['int8']}** with int8, and {llama['int4']} "
        "with int4.",
        "beside": _beside(),
        "noise": _noise(found),
        "slower": f"In {slower} of {len(found)} cases a plain region takes at least "
        f"{speed.GAIN:.2f} of the time of the faster of float32 and `torch.autocast`.",
        "int4": _int4(),
        "memory": _memory(),
        "compiled": _compiled(),
        "generate": _generate(),
    }


def _noise(found: dict[str, speed.Times]) -> str:
    """Say by how much processes, and turns, of the same work differ."""
    again = [abs(each.least - 1) for of in found.values() if (each := of.get(speed.AGAIN))]
    turns = [each.most / each.least - 1 for of in found.values() for each in of.values() if each and each.most]
    sentence = (
        f"float32 in two processes differs by {statistics.median(again):.0%} in half of the {len(again)} cases, and by "
        f"up to {max(again):.0%}: smaller differences between ways are noise."
    )
    if turns:
        sentence += f" Half of the lines are longer than {statistics.median(turns):.0%} of their bar."
    return sentence


def _measured(benchmark: str) -> dict[tuple[str, str], Any]:
    """Return the figures of a benchmark on the number of threads that is shown, by case and baseline."""
    run = tables.run_of(benchmark)
    threads = speed.threads_of(run)
    return {(each["what"], each["against"]): each["measured"] for each in run["results"] if each["threads"] == threads}


def _beside() -> str:
    """Say how long int8 and int4 take relative to llama.cpp's formats."""
    found, steps = _measured(speed.LLAMA), ("1 token", "1 token after 2,048", "128 tokens")
    pairs = (("int8", "Q8_0"), ("int4", "Q4_0"))
    by_pair = (
        f"{ours} takes {one:.2f}, {after:.2f} and {many:.2f} of the time of llama.cpp's {theirs}"
        for ours, theirs in pairs
        for one, after, many in [[found[f"{step}, {ours}", theirs] for step in steps]]
    )
    return f"For a token, a token after 2,048 others, and 128 at once, {', and '.join(by_pair)}."


def _int4() -> str:
    one, many = (_measured("int4")[f"LLaMA 1.1 B, {tokens}, int4", "int8"] for tokens in ("1 token", "128 tokens"))
    return f"int4 takes {one:.2f} of int8's time to decode a token with LLaMA, and {many:.2f} for 128 tokens at once."


def _memory() -> str:
    found, ways = _measured("occupied"), ("float32", "a WeightCache", "int8", "int4")
    own, mapped = (
        ", ".join(f"{way} {found[f'LLaMA 1.1 B, {way}{kind}', '-']:,.0f} MB" for way in ways)
        for kind in ("", ", weights mapped")
    )
    return f"A process with LLaMA: {own}. With its weights mapped from a file: {mapped}."


def _generate() -> str:
    """Say how long a token takes with generate()."""
    found = _measured("serving")
    plain, static = (
        found[f"LLaMA of 22 layers of 1.1 B's, int4, a token, generate(){cache}", "the forward pass"]
        for cache in ("", ", static cache")
    )
    return (
        f"For a LLaMA of 1.1 B weights, a token takes {plain:.2f} of the loop's time with `generate()`, and "
        f"{static:.2f} with a static cache."
    )


def _compiled() -> str:
    what, found = "GPT-2 small, 1 token, WeightCache", _measured("compiled")
    against = (
        f"{found[what, f'compiled {other}']:.2f} of a compiled {name}'s time" for other, name in _COMPILED.items()
    )
    return f"Compiled, GPT-2 decodes a token with a WeightCache in {', '.join(against)}."


_COMPILED = {"torch": "`torch.autocast`", "bfloat16": "bfloat16 copy", "float32": "float32 model"}


def updated(page: str) -> str:
    """Return a page with the current figures."""
    found = sentences()
    page = _BETWEEN.sub(lambda match: f"{match['name']}: make docs -->\n{found[match['name']]}\n", page)
    return speed.described(page)
