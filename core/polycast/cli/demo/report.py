"""Printing the demo's results."""

import torch
from rich.console import Console

from ...policy.dtypes import dtype_name
from ..terminal import print_line, print_table, table
from .inference_timing import BATCH, FEATURES, LAYERS
from .result_checks import DemoResult
from .training import FLOAT32, INT8, MODES, POLYCAST, TORCH, Mode


def print_result(result: DemoResult, out: Console) -> None:
    """Print the results on one device: the runs, the output dtypes of the layers, the timings."""
    _print_runs(result, out)
    out.print()
    _print_dtypes(result, out)
    out.print()
    _print_timings(result, out)


def _print_runs(result: DemoResult, out: Console) -> None:
    rows = table(
        "mode",
        "test accuracy",
        "final loss",
        numbers=("test accuracy", "final loss"),
        title=f"Training on {result.device_type}, fast dtype {dtype_name(result.dtype)}",
    )
    for run in result.runs.values():
        rows.add_row(run.mode, f"{run.accuracy:.2%}", f"{run.loss:.8f}")
    print_table(out, rows)


def _print_dtypes(result: DemoResult, out: Console) -> None:
    rows = table("layer", *result.runs, title="Output dtypes")
    for layer in result.runs[FLOAT32.name].dtypes:
        rows.add_row(layer, *(run.dtypes[layer] for run in result.runs.values()))
    print_table(out, rows)


def _print_timings(result: DemoResult, out: Console) -> None:
    timing = result.timing
    columns = ("ms a call", "times float32", *(["accuracy"] if result.accuracies else []))
    rows = table(
        "mode",
        *columns,
        numbers=columns,
        title=f"Inference: {BATCH} rows by {LAYERS} layers of {FEATURES} x {FEATURES}",
    )
    for mode in _modes(result):
        accuracy = [f"{result.accuracies[mode.name]:.2%}"] if result.accuracies else []
        rows.add_row(mode.name, f"{timing.median(mode) * 1e3:.1f}", f"{timing.ratio(mode, FLOAT32):.2f}", *accuracy)
    print_table(out, rows)
    note = (
        f"Medians of {len(timing.rounds)} rounds in which the modes take turns, on {torch.get_num_threads()} threads."
    )
    if result.accuracies:
        note += " Accuracy: of the small network that was trained in float32."
    print_line(out, note)
    for each in result.low_bit:
        where = f"{dtype_name(result.dtype)}: {each.declined}" if each.declined else each.recipe
        print_line(out, f"{each.op.removeprefix('aten::')}: {each.calls} in {where}.")
    print_line(out, conclusion(result))
    out.print()


def _modes(result: DemoResult) -> list[Mode]:
    """Return the timed modes."""
    return [mode for mode in (*MODES, INT8) if mode.name in result.timing.rounds[0]]


def conclusion(result: DemoResult) -> str:
    """Return a sentence that compares the times."""
    timing, dtype = result.timing, dtype_name(result.dtype)
    text = (
        f"On {result.device_type} these layers {_compared(timing.ratio(POLYCAST, FLOAT32))} float32 in {dtype} with "
        f"polycast.autocast, which {_compared(timing.ratio(POLYCAST, TORCH), 'is', 'takes')} torch.autocast"
    )
    if INT8 in _modes(result):
        text += f"; in int8 they {_compared(timing.ratio(INT8, FLOAT32))} float32"
    return f"{text}."


def _compared(ratio: float, are: str = "are", take: str = "take") -> str:
    """Return a comparison of two times, for the middle of a sentence."""
    if ratio > 1 + _EQUAL:
        return f"{take} {ratio:.2f} times as long as"
    if ratio < 1 - _EQUAL:
        return f"{are} {1 / ratio:.2f} times as fast as"
    return f"{are} as fast as"


_EQUAL = 0.03
"""Times with a smaller relative difference are equal: it is noise."""
