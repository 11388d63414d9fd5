"""Measure every ratio that polycast is held to, in one run: ``python -m benchmarks`` in the root of the repository."""

import gc
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from polycast.engine.choice import choose

from . import compiled, low_bit, observing, once, ops, small, tuned
from .accuracy import Accuracy, Scores
from .apart import Apart
from .processes import ImportTime, PeakMemory
from .timing import Result


class Benchmark(Protocol):
    def run(self, quick: bool) -> Iterator[list[Result]] | Iterator[list[Scores]]: ...


def _apart(function: str, *, least: bool = False) -> Callable[[], Benchmark]:
    return partial(Apart, f"{__package__}.{function}", least)


BENCHMARKS: dict[str, Callable[[], Benchmark]] = {
    "region": _apart("small:region", least=True),
    "mm-float32": _apart("small:mm_float32", least=True),
    "mm-bfloat16": _apart("small:mm_bfloat16", least=True),
    "mm-weight": _apart("small:mm_weight", least=True),
    "relu": _apart("small:relu", least=True),
    "observing": observing.ops,
    "observing-training": observing.training,
    "ops": _apart("ops:against_torch", least=True),
    "policy": small.policy,
    "policy-ops": ops.under_policy,
    "depth": small.depth,
    "threads": small.threads,
    "lookup": small.lookup,
    "out-dtype": small.out_dtype,
    "import": ImportTime,
    "memory": PeakMemory,
    "once": _apart("once:by_size", least=True),
    "rates": _apart("once:rates"),
    "peak": once.PeakOfThreads,
    "scenarios": _apart("scenarios:scenarios"),
    "leaving": small.leaving,
    "linears": _apart("models:linears"),
    "gpt2": _apart("models:gpt2"),
    "training": _apart("training:training"),
    "compiled": compiled.inference,
    "compiled-training": compiled.training,
    "compiled-memory": compiled.Memory,
    "tuned": tuned.tuned,
    "low-bit": low_bit.eager,
    "low-bit-compiled": low_bit.compiled,
    "accuracy": Accuracy,
}


def environment() -> dict[str, str | int]:
    """Return the machine and the versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "torch threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "polycast": importlib.metadata.version("polycast"),
        "engine": choose().name,
    }


def measure(names: list[str], quick: bool) -> tuple[list[Result], list[Scores]]:
    """Run benchmarks with a progress line on stderr; return figures of time and memory, and scores of accuracy."""
    results: list[Result] = []
    scores: list[Scores] = []
    columns = (TextColumn("{task.description:12}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        all_of_them = progress.add_task("", total=len(names))
        for name in names:
            progress.update(all_of_them, description=name)
            for found in BENCHMARKS[name]().run(quick):
                results += [each for each in found if isinstance(each, Result)]
                scores += [each for each in found if isinstance(each, Scores)]
            gc.collect()  # the models, before the next is timed
            progress.advance(all_of_them)
    return results, scores


def table(results: list[Result]) -> Table:
    """Return the results for people."""
    new = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column, justify in (("what", "left"), ("against", "left"), ("measured", "right"), ("at most", "right")):
        new.add_column(column, justify=justify, no_wrap=True)
    new.add_column("", no_wrap=True)
    for result in results:
        bound = f"{result.at_most:g}{result.unit}"
        if result.measured is None:
            new.add_row(result.what, result.against, "-", bound, result.skipped)
            continue
        number = f"{result.measured:.1f}" if result.unit else f"{result.measured:.3f}"
        verdict = "[green]ok[/]" if result.ok else "[bold red]MISSED[/]"
        new.add_row(result.what, result.against, number + result.unit, bound, verdict)
    return new


def table_of_accuracy(scores: list[Scores]) -> Table:
    """Return the scores for people."""
    ways = next((list(each.by) for each in scores if each.by), [])
    new = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("what", "measure", *ways, "kept"):
        new.add_column(column, justify="right" if column in ways else "left", no_wrap=True)
    for each in scores:
        numbers = [f"{each.by[way]:.3f}" for way in ways] if each.by else ["-" for _ in ways]
        new.add_row(each.what, each.metric, *numbers, each.skipped or each.kept)
    return new


def _verdict(results: list[Result]) -> str:
    missed = sum(not result.ok for result in results)
    skipped = sum(result.measured is None for result in results)
    within = f"\n{len(results) - missed - skipped} of {len(results)} within their bounds, {missed} missed"
    return f"{within}, {skipped} skipped." if skipped else f"{within}."


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats: for trying, not for figures.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Run this one; may be repeated. {', '.join(BENCHMARKS)}.")
    ] = None,
) -> None:
    """Measure polycast against torch on this machine's CPU."""
    unknown = [name for name in only or [] if name not in BENCHMARKS]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]!r}: expected one of {', '.join(BENCHMARKS)}.")
    about = environment()
    # Wide enough for the table also where the output is a file.
    out = Console(width=max(190, Console().width), highlight=False)
    for key, value in about.items():
        out.print(f"{key}: {value}", markup=False)
    out.print()
    results, scores = measure([name for name in BENCHMARKS if not only or name in only], quick)
    if scores:
        out.print(table_of_accuracy(scores))
    if results:
        out.print(table(results))
        out.print(_verdict(results))
    if json_file is not None:
        written = [{**asdict(result), "ok": result.ok} for result in results]
        accuracies = [asdict(each) for each in scores]
        said = {"quick": quick, "environment": about, "results": written, "accuracy": accuracies}
        json_file.write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
