"""``polycast demo``: train and infer on every available device, and check the results."""

import functools
import operator
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...engine.choice import choose_engine
from ...engine.installation import uninstall
from ...observer.headline import headline
from ...observer.observation import Observation
from ...observer.observe import observe
from ...region.slow_dtype import describe
from ...registry.registry import backends, get_backend
from ..devices import plugins_needed
from ..output import check_output
from ..terminal import console, ignore_slow_dtypes, library_errors, print_line
from .digits import Digits, load_digits
from .inference_timing import ROUNDS, time_inference
from .report import print_result
from .result_checks import DemoResult, problems
from .training import FLOAT32, MODES, accuracy, batches, inference_modes, observe_training, train


def measure(
    device_type: str,
    dtype: torch.dtype,
    digits: Digits,
    epochs: int,
    advance: Callable[[str], object],
    observes: bool = True,
) -> DemoResult:
    """Train the network in each mode on one device, and time inference of a few large layers.

    Args:
        device_type: an available device.
        dtype: the fast dtype.
        digits: the data, on the host.
        epochs: the number of epochs.
        advance: called after each of :func:`steps` steps with a description.
        observes: whether to observe, which needs C++.
    """
    here = digits.to(device_type)
    try:
        runs = {
            mode.name: train(mode, device_type, dtype, here, epochs, partial(advance, f"{device_type}: {mode.name}"))
            for mode in MODES
        }
        timing = time_inference(device_type, dtype, partial(advance, f"{device_type}: inference"))
        trained = runs[FLOAT32.name].network.eval()
        with observe() if observes else nullcontext() as inferred:
            accuracies = {
                mode.name: accuracy(mode, trained, device_type, dtype, here) for mode in inference_modes(device_type)
            }
        seen = observe_training(device_type, dtype, here) if observes else None
    finally:
        uninstall(device_type)
    return DemoResult(
        device_type, dtype, runs, timing, seen, accuracies, () if inferred is None else inferred.low_bit, epochs
    )


def steps(digits: Digits, epochs: int) -> int:
    """Return the number of steps of :func:`measure`."""
    return len(MODES) * epochs * batches(digits) + ROUNDS


def run(
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Train for this number of epochs.")] = 4,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report to a file. The default is one in a new temporary folder."),
    ] = None,
) -> None:
    """Train a small network on handwritten digits, and time a few large layers, on each available device.

    Both run with and without autocast. A report of a few steps shows what ran in which dtype, and why; it needs a C++
    compiler, or a wheel that contains the engine.

    The exit status is 1 if a run is not accurate, or if torch's autocast and polycast's disagree.
    """
    out = console()
    with library_errors(), _loading("the engine"):
        if report is not None:
            check_output(report)
        statuses, engine = backends(), choose_engine().name
        unobserved = _why_unobserved()
        if report is not None and unobserved is not None:
            raise RuntimeError(unobserved)
    try:
        with _loading("scikit-learn's digits"):
            digits = load_digits()
    except ImportError as error:
        typer.echo(f'polycast: the demo needs scikit-learn: pip install "polycast[demo]" ({error})', err=True)
        raise typer.Exit(1) from error
    ready = {name: status.default_dtype for name, status in statuses.items() if status.state == "ready"}
    out.print(
        f"{len(digits.images):,} handwritten digits for training, {len(digits.test_images):,} for testing; "
        f"epochs: {epochs}.\ntorch {torch.__version__}, engine: {engine}."
    )
    for name, status in statuses.items():
        if name not in ready and status.state != "missing":
            print_line(out, f"Not on {name}: {status.reason}")
    missing = [status for status in statuses.values() if status.state == "missing"]
    if missing:
        print_line(out, f"Not on {plugins_needed(missing)}")
    if not ready:
        typer.echo("polycast: no device is available; see polycast devices", err=True)
        raise typer.Exit(1)
    for name, dtype in ready.items():
        slow = None if dtype is None else describe(get_backend(name), dtype)
        if slow is not None:
            print_line(out, f"{slow}.")
    started = time.perf_counter()
    with ignore_slow_dtypes(), _progress(len(ready) * steps(digits, epochs)) as advance:
        results = [
            measure(name, dtype, digits, epochs, advance, unobserved is None)
            for name, dtype in ready.items()
            if dtype is not None
        ]
    for result in results:
        out.print()
        print_result(result, out)
    problems_found = _conclude(results, time.perf_counter() - started)
    if unobserved is None:
        _write_report([result.seen for result in results if result.seen is not None], report)
    else:
        typer.echo(f"No report: {unobserved}")
    if problems_found:
        raise typer.Exit(1)


def _why_unobserved() -> str | None:
    """Return why nothing can be observed here; None: it can."""
    try:
        with observe():
            return None
    except RuntimeError as error:
        return str(error)


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Show on stderr, if that is a terminal, that something is loaded, which may take long."""
    screen = console(stderr=True)
    with screen.status(f"Loading {what}") if screen.is_terminal else nullcontext():
        yield


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], object]]:
    """Show the progress on stderr, as a bar or, if that is not a terminal, a line for each part.

    Yield a function that advances it by a step.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _printed_once(screen)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("training", total=total)
        yield lambda doing: bar.update(task, advance=1, description=doing)


def _printed_once(screen: Console) -> Callable[[str], object]:
    """Return a function that prints a text unless it is the one printed last."""
    last = ""

    def advance(doing: str) -> None:
        nonlocal last
        if doing != last:
            last = doing
            screen.print(f"{doing} ...", soft_wrap=True)

    return advance


def _conclude(results: list[DemoResult], seconds: float) -> bool:
    """Print whether the results are right; return whether there are problems."""
    found = [problem for result in results for problem in problems(result)]
    for problem in found:
        typer.echo(f"polycast: {problem}", err=True)
    if found:
        return True
    for result in results:
        difference = result.loss_difference()
        apart = f"differ by {difference:.1e}" if difference else "are equal to the last bit"
        print_line(
            console(),
            f"OK on {result.device_type}: every run is at least {result.min_accuracy:.0%} accurate, and the final "
            f"losses of the two autocasts {apart}.",
        )
    typer.echo(f"Done in {seconds:.0f} s.")
    return False


def _write_report(seen: list[Observation], path: Path | None) -> None:
    together = functools.reduce(operator.add, seen)
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="polycast-demo-")) / "report.html"
    with library_errors():
        together.to_html(path)
    print_line(console(), f"Report in {path}: {headline(together)}.")
