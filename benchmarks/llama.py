"""A LLaMA on llama.cpp, torch and polycast, in several formats: times by step, memory, and the time to load.

Each side has a process of its own (:mod:`benchmarks.llama_sides`). All of a wave live at once and take turns, and the
least time of all turns counts. float32 is in each wave, as the baseline.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import gguf_files, llama_sides
from .apart import Worker
from .fastest import llama
from .llama_sides import (
    CACHED,
    COMPILED,
    COPY,
    FASTEST,
    FLOAT32,
    INT4,
    INT4_64,
    INT4_128,
    INT4_COMPILED,
    INT8,
    INT8_COMPILED,
    LONGEST,
    MOST_SEQUENCES,
    OF_SEVERAL,
    PLAIN,
    TORCH,
    TORCHAO_4,
    TORCHAO_8,
    WAYS,
    Step,
)
from .timing import Plan, Ratio, Result

WAVES: Sequence[Sequence[str]] = (
    (FLOAT32, COPY, "Q4_0", "Q4_K_M", INT4, INT4_64, INT4_128, "Q8_0", INT8),
    (FLOAT32, "BF16", "F16", CACHED, FASTEST, PLAIN, TORCH, TORCHAO_8, TORCHAO_4),
)
"""The sides that live at once: as many as fit into 16 GB of memory, with the files that they map."""
WITH_COMPILED = (FLOAT32, "Q4_0", INT4, INT4_COMPILED, "Q8_0", INT8, INT8_COMPILED)

_SEVERAL = Step(1, OF_SEVERAL, MOST_SEQUENCES)
STEPS: Mapping[Step, int] = {
    Step(1): 12,
    Step(1, 512): 8,
    Step(1, LONGEST): 8,
    Step(8): 6,
    Step(128): 3,
    Step(512): 2,
    Step(1, OF_SEVERAL, 2): 6,
    Step(1, OF_SEVERAL, 4): 6,
    _SEVERAL: 6,
}
"""The steps that are timed, and in how many rounds."""
DECODING = {step: rounds for step, rounds in STEPS.items() if step.tokens == step.sequences == 1}
_MANY = {Step(8): 0.8, Step(128): 0.6, Step(512): 0.6, _SEVERAL: 0.6, Step(1, LONGEST): 1.0}
BOUNDS: Mapping[tuple[str, str], Mapping[Step, float]] = {
    (INT4, "Q4_0"): {Step(1): 1.0, **_MANY},
    (INT4_128, "Q4_0"): {Step(1): 0.93},
    (INT8, "Q8_0"): {Step(1): 0.95, **_MANY},
    (INT4_COMPILED, "Q4_0"): dict.fromkeys(DECODING, 1.0),
    (INT8_COMPILED, "Q8_0"): dict.fromkeys(DECODING, 0.95),
    (FASTEST, "BF16"): {Step(1): 1.0, Step(1, LONGEST): 1.0},
}
"""Bounds of a side's time relative to that of llama.cpp's format with about as many bits."""
_SECONDS = 0.2
"""A turn makes as many steps as about that takes, and one at least."""
_TOLERANCE = 1e-3
"""The largest difference between llama.cpp's logits in float32 and torch's, of the largest logit."""
_CHECKED = 24
_QUICK_LAYERS = 4


_SLOW = 3
"""A side beyond so many times float32's time is timed once."""


@dataclass(frozen=True)
class LlamaCpp:
    """The benchmark `llama-cpp`.

    Attributes:
        threads: the numbers of threads.
        waves: the sides that live at once.
        steps: the steps that are timed, and in how many rounds.
    """

    threads: Sequence[int]
    waves: Sequence[Sequence[str]] = WAVES
    steps: Mapping[Step, int] = field(default_factory=lambda: STEPS)

    def run(self, quick: bool) -> list[Result]:
        """Return all figures; with `quick`, those of a model of a few layers.

        Raises:
            RuntimeError: llama.cpp computes other logits in float32 than torch.
        """
        why = gguf_files.missing()
        if why:
            return list(self._skipped(why))
        made = llama(layers=_QUICK_LAYERS) if quick else llama()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(made, folder, {name for wave in self.waves for name in wave})
            del made
            return [result for wave in self.waves for result in self._of_wave(folder, wave, quick)]

    def _skipped(self, why: str) -> Iterator[Result]:
        for number, wave, step in itertools.product(self.threads, self.waves, self.steps):
            for each in ratios(step, wave):
                sides = each.ours, each.others[0]
                yield Result(each.what, each.against, None, each.at_most, sides=sides, skipped=why, threads=number)

    def _of_wave(self, folder: Path, wave: Sequence[str], quick: bool) -> Iterator[Result]:
        """Yield the figures of sides that live at once."""
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            left_out: dict[str, str] = {}
            for name in wave:
                worker = stack.enter_context(_worker(folder, name, self.threads[0]))
                loaded = worker.answer()
                if "why" in loaded:
                    left_out[name] = loaded["why"]
                    continue
                workers[name] = worker
                yield from _sizes(name, loaded, self.threads[0])
            for number in self.threads:
                for worker in workers.values():
                    worker.ask(json.dumps({"threads": number}))
                for step, rounds in self.steps.items():
                    plan, taken = _raced(workers, step, rounds, quick)
                    whole = replace(plan, ratios=ratios(step, wave), left_out=left_out)
                    yield from (replace(each, threads=number) for each in whole.results(taken, least=True))


Compiled = partial(LlamaCpp, waves=[WITH_COMPILED], steps=DECODING)
"""The benchmark `llama-compiled`: polycast's sides with and without ``torch.compile``, for a token at a time."""


def ratios(step: Step, sides: Sequence[str]) -> list[Ratio]:
    """Return the ratios of a step between sides."""
    pairs = {(name, FLOAT32): {} for name in sides if name != FLOAT32} | BOUNDS
    return [
        Ratio(f"{step}, {ours}", theirs, ours, theirs, bounds.get(step))
        for (ours, theirs), bounds in pairs.items()
        if {ours, theirs} <= {*sides}
    ]


def prepare(model: Any, folder: Path, sides: Set[str]) -> None:
    """Write a model for some sides into a folder, after a check that llama.cpp computes it as torch does.

    Raises:
        RuntimeError: llama.cpp computes other logits in float32 than torch.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1)  # small scales of the norms would hide the layers from the logits
    model.save_pretrained(folder)
    source = folder / "F32.gguf"
    gguf_files.write(model, source)
    check(folder)
    for name in sides & gguf_files.FORMATS.keys():
        gguf_files.quantize(source, folder / f"{name}.gguf", name)
    source.unlink()
    cached = {name.removesuffix(COMPILED) for name in sides & WAYS.keys() if WAYS[name].cached}
    for name in ("Q4_0", *cached):
        with _worker(folder, name, torch.get_num_threads()) as worker:
            if "why" not in worker.answer():
                worker.ask(json.dumps({"save": True}))


def check(folder: Path) -> None:
    """Compare llama.cpp's logits in float32 with torch's.

    Raises:
        RuntimeError: they differ.
    """
    tokens = llama_sides.ids(_CHECKED)
    theirs, ours = (llama_sides.load(folder, name).logits(tokens) for name in ("F32", FLOAT32))
    error = ((theirs - ours).abs().max() / ours.abs().max()).item()
    if not error <= _TOLERANCE:
        raise RuntimeError(
            f"llama.cpp's logits of {len(tokens)} tokens in float32 differ from torch's by {error:.2g} of the largest; "
            f"expected at most {_TOLERANCE:g}: it computes another model, and nothing can be compared."
        )


def _worker(folder: Path, name: str, threads: int) -> Worker:
    return Worker("benchmarks.llama_sides", str(folder), name, str(threads), environment={})


def _sizes(name: str, loaded: Mapping[str, float], threads: int) -> Iterator[Result]:
    """Yield what a side takes to be loaded, its first token included."""
    yield Result(f"{name}, load", "-", loaded["seconds"], None, " s", threads=threads)
    for kind in ("anonymous", "mapped"):
        yield Result(f"{name}, {kind} memory", "-", loaded[kind], None, " MB", threads=threads)


def _raced(
    workers: Mapping[str, Worker], step: Step, rounds: int, quick: bool
) -> tuple[Plan, list[Mapping[str, float]]]:
    """Return a plan with the times of slow sides, and the least times of the others in each round."""

    def time(name: str, calls: int) -> float:
        seconds: float = workers[name].ask(json.dumps({"step": step, "calls": calls}))
        return seconds

    # The first compiles, and may read files from disk.
    _, first, then = ({name: time(name, 1) for name in workers} for _ in range(3))
    slow = {name for name, seconds in then.items() if seconds > _SLOW * then[FLOAT32]}
    once = {name: min(first[name], then[name]) for name in slow}
    calls = {name: max(1, round(_SECONDS / seconds)) for name, seconds in then.items() if name not in slow}
    order, taken = list(calls), []
    for _ in range(max(1, rounds // 4) if quick else rounds):
        taken.append({name: time(name, calls[name]) for name in order})
        order.reverse()
    return Plan([], once=once), taken
