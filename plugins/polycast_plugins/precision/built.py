"""Models that a script's function builds, for the commands that take ``SCRIPT:BUILD``."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer

Target: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT:BUILD", help="A Python file, and a function in it that returns a model and its inputs."
    ),
]
FastDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Use this fast dtype, such as float16. The default is the device's."),
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
