"""``polycast explain`` and ``polycast tune``, for a model that a function of a script builds."""

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer

from polycast.plugin import read_dtype, read_recipe
from polycast_plugins.cli import check_output, console, library_errors, print_json, print_result

from .evidence import Tuned
from .explain import explain
from .tune import tune

Target: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT:BUILD", help="A Python file, and a function in it that returns a model and its inputs."
    ),
]
FastDtype: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Use this fast dtype, such as float16. The default is the device's.")
]
_BUILD = (
    "It must return (model, data), (model, data, metric) or (model, data, metric, loss), as polycast.tune takes them."
)


def function_of(target: str) -> Any:
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


def built(target: str, result: Any) -> tuple[torch.nn.Module, Any, Any, Any]:
    """Return the model, its data, the metric and the loss, or None, that the function of a target returned."""
    if not (isinstance(result, tuple) and len(result) in (2, 3, 4) and isinstance(result[0], torch.nn.Module)):
        raise typer.BadParameter(f"{target!r} returned {type(result).__name__}. {_BUILD}")
    model, data, *functions = result
    metric, loss = (*functions, None, None)[:2]
    return model, data, metric, loss


def run_explain(
    target: Target,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Explain for this device, by default the model's, if not meta.")
    ] = None,
    dtype: FastDtype = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="Use the policy of this file.")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use this recipe, such as int8, without gradients.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the dtypes that a model's modules compute in and return in a region. Nothing is computed."""
    build = function_of(target)
    with library_errors():
        fast = None if dtype is None else read_dtype(dtype)
    model, inputs, *_ = built(target, build())
    with library_errors(), torch.set_grad_enabled(recipe is None):
        found = explain(model, inputs, device_type=device, dtype=fast, policy=policy, recipe=recipe)
    if as_json:
        print_json(found.to_dict())
    else:
        print_result(console(), found)


def run_tune(
    target: Target,
    dtype: FastDtype = None,
    tolerance: Annotated[
        float, typer.Option(metavar="NUMBER", help="Accept this error of the output, relative to float32.")
    ] = 1e-2,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Find what this recipe, such as int8, must leave out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the policy to a file instead of the standard output.")
    ] = None,
) -> None:
    """Find the modules that must run in float32, or without a recipe, and write a policy for them.

    The exit status is 1 if no policy keeps the tolerance. polycast.tune has more options.
    """
    with library_errors():
        if output is not None:
            check_output(output, "policy.toml")  # before the search, which may take minutes
    build = function_of(target)
    with library_errors():
        fast = None if dtype is None else read_dtype(dtype)
        wanted = None if recipe is None else read_recipe(recipe)
    model, data, metric, loss = built(target, build())
    try:
        with library_errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no policy keeps the tolerance", UserWarning)  # reported below
            tuned = tune(model, data, metric, tolerance=tolerance, dtype=fast, recipe=wanted, loss=loss)
            _write(tuned, output)
    except KeyboardInterrupt:
        typer.echo("polycast: interrupted", err=True)
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
