"""What the demo prints of its results."""

from rich.console import Console

from ...policy.dtypes import dtype_name
from ..terminal import table
from .checks import Result
from .timing import Timing
from .training import FLOAT32, INT8, MODES, POLYCAST, TORCH, Mode


def print_result(result: Result, out: Console) -> None:
    """Print what was found on one device: the runs, the dtypes of the layers' outputs, the timings."""
    _print_runs(result, out)
    out.print()
    _print_dtypes(result, out)
    out.print()
    _print_timings(result, out)


def _print_runs(result: Result, out: Console) -> None:
    rows = table(
        "mode",
        "test accuracy",
        "final loss",
        "seconds",
        numbers=("test accuracy", "final loss", "seconds"),
        title=f"Training on {result.device_type}, fast dtype {dtype_name(result.dtype)}",
    )
    for run in result.runs.values():
        rows.add_row(run.mode, f"{run.accuracy:.2%}", f"{run.loss:.8f}", f"{run.seconds:.2f}")
    out.print(rows)


def _print_dtypes(result: Result, out: Console) -> None:
    rows = table("layer", *result.runs, title="What the layers put out")
    for layer in result.runs[FLOAT32.name].dtypes:
        rows.add_row(layer, *(run.dtypes[layer] for run in result.runs.values()))
    out.print(rows)


def _print_timings(result: Result, out: Console) -> None:
    modes = [mode for mode in (*MODES, INT8) if mode.name in result.timings[0].rounds[0]]
    columns = [mode.name.replace(".", ".\n").replace(" ", "\n") for mode in modes]
    rows = table(
        "images",
        *columns,
        "polycast / torch",
        numbers=("images", *columns, "polycast / torch"),
        title="Inference, ms a call (x: times float32's)",
    )
    for timing in result.timings:
        rows.add_row(
            str(timing.images),
            *(_cell(timing, mode) for mode in modes),
            f"{timing.ratio(POLYCAST, TORCH):.2f}x",
        )
    if result.accuracies:
        rows.add_row("right", *(f"{result.accuracies[mode.name]:.2%}" for mode in modes), "")
    out.print(rows)
    out.print(f"Medians of {len(result.timings[0].rounds)} rounds in which the modes take turns.")
    if result.accuracies:
        out.print("right: how many of the test images, with the network that was trained in float32.")
    for each in result.low_bit:
        where = f"{dtype_name(result.dtype)}: {each.declined}" if each.declined else each.recipe
        out.print(f"{each.op.removeprefix('aten::')}: {each.calls} in {where}.", soft_wrap=True)
    out.print()


def _cell(timing: Timing, mode: Mode) -> str:
    text = f"{timing.median(mode) * 1e3:.2f}"
    return text if mode is FLOAT32 else f"{text} ({timing.ratio(mode, FLOAT32):.2f}x)"
