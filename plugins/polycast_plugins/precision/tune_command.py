"""``polycast tune``: search for a policy, and write its file."""

import enum
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from polycast.plugin import read_dtype, read_recipe
from polycast_plugins.cli import check_output, console, library_errors

from .built import FastDtype, Target, built, function_of
from .evidence import Tuned
from .tune import tune


class Over(enum.Enum):
    """The candidates of the search."""

    MODULES = "modules"
    OPS = "ops"


class Objective(enum.Enum):
    """The objective of the search."""

    ACCURACY = "accuracy"
    TIME = "time"


class Reduction(enum.Enum):
    """The distance over several batches."""

    WORST = "worst"
    MEAN = "mean"


def run(
    target: Target,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run the region on this device. The default is the model's.")
    ] = None,
    dtype: FastDtype = None,
    tolerance: Annotated[
        float, typer.Option(metavar="NUMBER", help="Accept this error of the output, relative to float32.")
    ] = 1e-2,
    over: Annotated[
        Over, typer.Option(metavar="NAME", help="Choose the precision of each of these: modules or ops.")
    ] = Over.MODULES,
    objective: Annotated[
        Objective,
        typer.Option(
            metavar="NAME",
            help="Look for a small set in float32 (accuracy), or for the fastest precision of each (time).",
        ),
    ] = Objective.ACCURACY,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Find what this recipe, such as int8, must leave out."),
    ] = None,
    margin: Annotated[
        float, typer.Option(metavar="SHARE", help="Stay this share below the tolerance, such as 0.2.")
    ] = 0.0,
    reduction: Annotated[
        Reduction, typer.Option(metavar="NAME", help="Take the worst error of several batches, or the mean.")
    ] = Reduction.WORST,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Leave these modules, or ops, in float32. Can be repeated."),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Choose among these only, each block of modules as one. Can be repeated."),
    ] = None,
    holdout: Annotated[
        int, typer.Option(metavar="N", min=0, help="Only measure the last N batches, with the policy that is found.")
    ] = 0,
    budget: Annotated[int | None, typer.Option(metavar="N", help="Stop after this number of evaluations.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the policy to a file instead of the standard output.")
    ] = None,
) -> None:
    """Find what must run in float32, or without a recipe, and write a policy for it.

    The exit status is 1 if no policy keeps the tolerance.
    """
    with library_errors():
        if output is not None:
            check_output(output, "policy.toml")  # before the search, which may take minutes
    build = function_of(target)
    with library_errors():
        fast = None if dtype is None else read_dtype(dtype)
        wanted = None if recipe is None else read_recipe(recipe)
    model, data, metric, loss = built(target, build())
    held_out = None
    if holdout:
        data, held_out = _split(data, holdout)
    try:
        with library_errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no policy keeps the tolerance", UserWarning)  # reported below
            tuned = tune(
                model,
                data,
                metric,
                tolerance=tolerance,
                device_type=device,
                dtype=fast,
                over=over.value,
                objective=objective.value,
                budget=budget,
                recipe=wanted,
                loss=loss,
                reduction=reduction.value,
                margin=margin,
                exclude=exclude or (),
                candidates=candidates or None,
                holdout=held_out,
            )
            _write(tuned, output)
    except KeyboardInterrupt:
        typer.echo("polycast: interrupted", err=True)
        raise typer.Exit(130) from None
    if not tuned.met:
        typer.echo(f"polycast: {tuned.evidence.reason}. The closest policy is written.", err=True)
        raise typer.Exit(1)


def _split(data: Any, holdout: int) -> tuple[list[Any], list[Any]]:
    """Return the batches of the search, and those held out."""
    batches = [data] if isinstance(data, (torch.Tensor, tuple, Mapping)) else list(data)
    if holdout >= len(batches):
        raise typer.BadParameter(
            f"--holdout {holdout} leaves no batch of {len(batches)} for the search: return more of them."
        )
    return batches[:-holdout], batches[-holdout:]


def _write(tuned: Tuned, output: Path | None) -> None:
    if output is None:
        typer.echo(tuned.text(), nl=False)
        return
    tuned.save(output)
    console().print("\n".join([*tuned.evidence.lines(), f"written: {output}"]), soft_wrap=True)
