"""``polycast explain``: the dtypes of a model's modules in a region, before anything runs."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from polycast.plugin import read_dtype
from polycast_plugins.cli import console, library_errors, print_json

from .built import FastDtype, Target, built, function_of
from .explain import explain


def run(
    target: Target,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run the region on this device. The default is the model's.")
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
        console().print(found)
