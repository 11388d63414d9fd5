"""``polycast tune``: search for a policy, and write its file."""

import enum
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..observer.report.target import check_target
from ..policy.names import read_dtype
from ..policy.recipe import read_recipe
from ..precision.evidence import Tuned
from ..precision.tune import tune
from .terminal import console, library_errors

_BUILD = "It must return (model, inputs) or (model, inputs, metric), as polycast.tune takes them."


class Over(enum.Enum):
    """The candidates of the search."""

    MODULES = "modules"
    OPS = "ops"


class Objective(enum.Enum):
    """The objective of the search."""

    ACCURACY = "accuracy"
    TIME = "time"


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:BUILD", help="A Python file, and a function in it that returns a model and its inputs."
        ),
    ],
    device: Annotated[str, typer.Option(metavar="NAME", help="Run the region on this device.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use this fast dtype, such as float16. The default is the device's."),
    ] = None,
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
            help="Look for the smallest set in float32 (accuracy), or for the fastest precision of each (time).",
        ),
    ] = Objective.ACCURACY,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Find what this recipe, such as int8, must leave out."),
    ] = None,
    budget: Annotated[int | None, typer.Option(metavar="N", help="Stop after this number of evaluations.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the policy to a file instead of the standard output.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save evaluations to a file, and resume from it.")
    ] = None,
) -> None:
    """Find what must run in float32, or without a recipe, and write a policy for it.

    The exit status is 1 if no policy keeps the tolerance.
    """
    with library_errors():
        if output is not None:
            check_target(output, "policy.toml")  # before the search, which may take hours
    build = _function(target)
    with library_errors():
        fast = None if dtype is None else read_dtype(dtype)
        wanted = None if recipe is None else read_recipe(recipe)
    model, inputs, metric = _built(target, build())
    try:
        with library_errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no policy keeps the tolerance", UserWarning)  # reported below
            tuned = tune(
                model,
                inputs,
                metric,
                tolerance=tolerance,
                device_type=device,
                dtype=fast,
                over=over.value,
                objective=objective.value,
                budget=budget,
                state=state,
                recipe=wanted,
            )
            _write(tuned, output)
    except KeyboardInterrupt:
        kept = "" if state is None else f": the same command resumes from {state}"
        typer.echo(f"polycast: interrupted{kept}", err=True)
        raise typer.Exit(130) from None
    if not tuned.met:
        typer.echo(f"polycast: {tuned.evidence.reason}. The closest policy is written.", err=True)
        raise typer.Exit(1)


def _write(tuned: Tuned, output: Path | None) -> None:
    if output is None:
        typer.echo(tuned.text(), nl=False)
        return
    tuned.save(output)
    console().print("\n".join([*tuned.evidence.lines(), f"written: {output}"]), soft_wrap=True)


def _function(target: str) -> Any:
    """Return the function that a target names; its file is imported as a module."""
    name, colon, function = target.rpartition(":")
    path = Path(name)
    if not (colon and function.isidentifier()):
        raise typer.BadParameter(f"{target!r}: expected a file and a function in it, such as model.py:build.")
    if not path.is_file():
        raise typer.BadParameter(f"{target!r}: there is no file {name!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{target!r}: {name!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise typer.BadParameter(f"{target!r}: {name!r} has no function {function!r}. {_BUILD}")
    return getattr(module, function)


def _built(target: str, built: Any) -> tuple[torch.nn.Module, Any, Any]:
    if not (isinstance(built, tuple) and len(built) in (2, 3) and isinstance(built[0], torch.nn.Module)):
        raise typer.BadParameter(f"{target!r} returned {type(built).__name__}. {_BUILD}")
    model, inputs, *metric = built
    return model, inputs, metric[0] if metric else None
