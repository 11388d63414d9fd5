"""``polycast tune``: find what must stay in float32, or out of a recipe, and write the policy file that says so."""

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
    """What is chosen from."""

    MODULES = "modules"
    OPS = "ops"


class Objective(enum.Enum):
    """What is looked for."""

    ACCURACY = "accuracy"
    TIME = "time"


def run(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT:BUILD", help="A file, and a function in it that returns model and inputs.")
    ],
    device: Annotated[str, typer.Option(help="The device of the region.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="Its fast dtype, such as float16.  [default: the device's]")] = None,
    tolerance: Annotated[float, typer.Option(help="How far the output may be from float32's.")] = 1e-2,
    over: Annotated[Over, typer.Option(help="What to choose from.")] = Over.MODULES,
    objective: Annotated[
        Objective, typer.Option(help="The smallest set in float32, or the fastest precision for each.")
    ] = Objective.ACCURACY,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Find what must leave this recipe of the region: int8, int8:tensor, ..."),
    ] = None,
    budget: Annotated[int | None, typer.Option(help="How many evaluations there may be at most.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the policy there.  [default: to the standard output]")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep evaluations there, and go on from what is there.")
    ] = None,
) -> None:
    """Find what must stay in float32, or leave a recipe, and write the policy that says so.

    The status is 1 where no policy keeps the tolerance.
    """
    with library_errors():
        if output is not None:
            check_target(output, "policy.toml")  # now, for the search may take hours
    build = _function(target)
    with library_errors():
        fast = None if dtype is None else read_dtype(dtype)
        wanted = None if recipe is None else read_recipe(recipe)
    model, inputs, metric = _built(target, build())
    try:
        with library_errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no policy keeps the tolerance", UserWarning)  # it is said below
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
        kept = "" if state is None else f": the same command goes on from {state}"
        typer.echo(f"polycast: interrupted{kept}", err=True)
        raise typer.Exit(130) from None
    if not tuned.met:
        typer.echo(f"polycast: {tuned.evidence.reason}. The closest that was found is written.", err=True)
        raise typer.Exit(1)


def _write(tuned: Tuned, output: Path | None) -> None:
    if output is None:
        typer.echo(tuned.text(), nl=False)
        return
    tuned.save(output)
    console().print("\n".join([*tuned.evidence.lines(), f"written: {output}"]), soft_wrap=True)


def _function(target: str) -> Any:
    """Return the function that a target names; its file is run as an imported module is."""
    name, colon, function = target.rpartition(":")
    path = Path(name)
    if not (colon and function.isidentifier()):
        raise typer.BadParameter(f"{target!r}: expected a file and a function in it, such as model.py:build.")
    if not path.is_file():
        raise typer.BadParameter(f"{target!r}: there is no file {name!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{target!r}: {name!r} is no Python file.")
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
