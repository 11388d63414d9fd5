"""Measure all figures and check their bounds: ``python -m benchmarks`` in the root of the repository."""

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from polycast.engine.choice import choose_engine

from . import catalog
from .catalog import BENCHMARKS, Entry
from .processor import processor
from .scores import Scores
from .timing import Result


def environment() -> dict[str, str | int]:
    """Return the machine and the versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "polycast": importlib.metadata.version("polycast"),
        "engine": choose_engine().name,
    }


def measure(names: list[str], threads: list[int], quick: bool) -> Iterator[tuple[str, list[Result], list[Scores]]]:
    """Run benchmarks with a progress line on stderr; yield the figures and the scores of each.

    Args:
        names: the benchmarks.
        threads: the numbers of threads; if empty, those of the catalog.
        quick: whether to run fewer rounds.
    """
    turns = {name: list(_turns(BENCHMARKS[name], threads)) for name in names}
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        all_of_them = progress.add_task("", total=sum(map(len, turns.values())))
        for name, numbers in turns.items():
            results: list[Result] = []
            scores: list[Scores] = []
            for turn in numbers:
                progress.update(all_of_them, description=f"{name}, {' and '.join(map(str, turn))} threads")
                figures, of_accuracy = catalog.measure(name, *turn, quick=quick)
                results += figures
                scores += of_accuracy
                progress.advance(all_of_them)
            if numbers:
                yield name, results, scores


def _turns(entry: Entry, threads: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of threads of each process of a benchmark."""
    numbers = tuple(n for n in entry.threads() if not threads or n in threads)
    if entry.takes_threads and numbers:
        yield numbers
    elif not entry.takes_threads:
        yield from ((number,) for number in numbers)


def table(results: list[Result]) -> Table:
    """Return a table of the results."""
    new = Table(box=box.SIMPLE_HEAD, show_edge=False)
    columns = {
        "what": "left",
        "against": "left",
        "threads": "right",
        "measured": "right",
        "at most": "right",
        "": "left",
    }
    for column, justify in columns.items():
        new.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for result in results:
        bound = "" if result.at_most is None else f"{result.at_most:.4g}{result.unit}"
        cells = (result.what, result.against, str(result.threads))
        if result.measured is None:
            new.add_row(*cells, "-", bound, result.skipped)
            continue
        number = f"{result.measured:.1f}" if result.unit else f"{result.measured:.3f}"
        verdict = "" if result.at_most is None else "[green]ok[/]" if result.ok else "[bold red]MISSED[/]"
        new.add_row(*cells, number + result.unit, bound, verdict)
    return new


def table_of_accuracy(scores: list[Scores]) -> Table:
    """Return a table of the scores."""
    ways = list(dict.fromkeys(way for each in scores for way in each.by))
    new = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("what", "measure", *ways, "kept"):
        new.add_column(column, justify="right" if column in ways else "left", no_wrap=True)
    for each in scores:
        numbers = [f"{each.by[way]:.3f}" if way in each.by else "-" for way in ways]
        new.add_row(each.what, each.metric, *numbers, each.skipped or each.note or each.kept)
    return new


def _verdict(results: list[Result]) -> str:
    missed = sum(not result.ok for result in results)
    skipped = sum(result.measured is None for result in results)
    bounded = sum(result.at_most is not None and result.measured is not None for result in results)
    within = f"\n{bounded - missed} of {bounded} within their bounds, {missed} missed"
    return f"{within}, {skipped} skipped." if skipped else f"{within}."


def _written(results: list[Result], scores: list[Scores]) -> dict[str, Any]:
    return {
        "results": [{**asdict(result), "ok": result.ok} for result in results],
        "accuracy": [asdict(each) for each in scores],
    }


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results to this file.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer rounds: for trying, not for figures.")] = False,
    save: Annotated[
        bool,
        typer.Option(
            "--save", help="Save the figures in docs/figures, and update the tables and pictures of the docs."
        ),
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Run this one; may be repeated. {', '.join(BENCHMARKS)}.")
    ] = None,
    threads: Annotated[list[int] | None, typer.Option(metavar="N", help="Run on N threads; may be repeated.")] = None,
) -> None:
    """Measure polycast against torch on this machine."""
    unknown = [name for name in only or [] if name not in BENCHMARKS]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]!r}: expected one of {', '.join(BENCHMARKS)}.")
    about = environment()
    # Wide enough for the table, even if the output is a file.
    out = Console(width=max(190, Console().width), highlight=False)
    for key, value in about.items():
        out.print(f"{key}: {value}", markup=False)
    out.print()
    started, results, scores = time.perf_counter(), list[Result](), list[Scores]()
    names = [name for name in BENCHMARKS if not only or name in only]
    for name, figures, of_accuracy in measure(names, threads or [], quick):
        results += figures
        scores += of_accuracy
        if save:
            variables = dict(BENCHMARKS[name].environment)
            written = _written(figures, of_accuracy)
            _save(
                name,
                {"quick": quick, "threads": threads or [], "environment": about, "variables": variables, **written},
            )
    if scores:
        out.print(table_of_accuracy(scores))
    if results:
        out.print(table(results))
        out.print(_verdict(results))
    out.print(f"Done in {time.perf_counter() - started:.0f} s.")
    if json_file is not None:
        report = {"quick": quick, "environment": about, **_written(results, scores)}
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if save:
        from docs.__main__ import main as update_docs

        update_docs()


def _save(name: str, run: dict[str, Any]) -> None:
    from docs.tables import FIGURES

    (FIGURES / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
