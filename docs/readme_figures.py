"""Write the figures below the README's examples from docs/figures/bench."""

import re

from . import tables
from .pictures import speed

_BETWEEN = re.compile(r"(?<=<!-- figure of )(?P<name>\w+): make docs -->\n.*?(?=<!-- end -->)", re.DOTALL)
_LLAMA = "LLaMA 1.1 B, 1 token"
_BERT = "BERT base, 4 x 128 tokens"


def sentences() -> dict[str, str]:
    """Return the sentence below each example, by its name."""
    run = tables.run_of(speed.BENCHMARK)
    threads = speed.threads_of(run)
    measured = {
        each["what"]: each["measured"]
        for each in run["results"]
        if each["threads"] == threads and each["against"] == "float32"
    }

    def time(model: str, way: str) -> str:
        value = measured[f"{model}, {way}"]
        return "no time" if value is None else f"{value:.2f}"

    where = f"{run['environment']['cpu']}, {threads} thread{'s' * (threads > 1)}"
    return {
        "region": f"BERT base, 4 x 128 tokens, takes **{time(_BERT, 'a plain region')}** of float32's time ({where}).",
        "cache": f"A LLaMA of 1.1 billion weights decodes a token in **{time(_LLAMA, 'WeightCache')}** of float32's "
        f"time; under `torch.autocast` it takes {time(_LLAMA, 'torch.autocast')}, and as a bfloat16 copy "
        f"{time(_LLAMA, 'a bfloat16 copy')}.",
        "int8": f"The same LLaMA takes **{time(_LLAMA, 'int8')}** of float32's time, and BERT {time(_BERT, 'int8')}.",
    }


def updated(readme: str) -> str:
    """Return the README with the current figures."""
    found = sentences()
    return _BETWEEN.sub(lambda match: f"{match['name']}: make docs -->\n{found[match['name']]}\n", readme)


def main() -> None:
    """Write the README if a figure has changed."""
    readme = speed.README.read_text(encoding="utf-8")
    if updated(readme) != readme:
        speed.README.write_text(updated(readme), encoding="utf-8")
