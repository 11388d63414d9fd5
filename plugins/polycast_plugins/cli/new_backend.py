"""``polycast new-backend``: write a package with a backend, to edit and publish."""

import importlib.metadata
import keyword
import os
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Annotated

import torch
import typer

from polycast.plugin import STANDARD_POLICIES, Backend, drift_of, torch_name

_privateuse1_name: Callable[[], str] = torch_name(
    "torch._C._get_privateuse1_backend_name",
    lambda: "privateuseone",
    "`polycast new-backend` does not know whether a device is named",
)
_TEMPLATES = Path(__file__).with_name("templates")
_SUFFIX = ".template"


def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The device type as torch spells it, such as mtia or npu.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write it to this directory, new or empty. The default is one here, named as the package.",
        ),
    ] = None,
) -> None:
    """Write a package with a backend for a device: its entry point, op table, tests and README."""
    problem = _problem(name)
    if problem is not None:
        raise _exit(problem)
    target = Path(_distribution(name)) if directory is None else directory
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise _exit(f"{target} exists and is not an empty directory. Choose another one with --directory.")
        _write(target.resolve(), _render(name))
    except OSError as error:
        raise _exit(f"{target} cannot be written: {error}") from error
    folder = str(target) if target.is_absolute() or str(target).startswith(".") else os.path.join(".", target)
    # pip takes a bare name for one in the package index, which anybody may own there.
    install, test = ["pip", "install", f"{folder}[test]"], ["pytest", folder]
    typer.echo(f"{target}: the backend of {name}. Edit it, then: {shlex.join(install)} && {shlex.join(test)}")


def _exit(problem: str) -> typer.Exit:
    typer.echo(f"polycast: {problem}", err=True)
    return typer.Exit(2)


def _problem(name: str) -> str | None:
    """Return why there can be no backend of this name; None: there can."""
    if not (name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")):
        return (
            f"{name!r} cannot be part of a Python module's name. Name the device as torch does: letters, such as npu."
        )
    if name != name.lower():
        return f"{name!r} is not in lower case, as device types of torch are. Write {name.lower()}."
    try:
        known = torch.device(name)
    except RuntimeError as error:
        if "Expected one of" in str(error):  # well formed: an out-of-tree device, which its package will name
            return None
        return f"torch does not accept {name!r} as a device: {error}. Use letters and underscores, such as npu."
    if not torch.amp.is_autocast_available(known.type):
        return f"torch has no Autocast dispatch key for {name!r}, so it can have no backend."
    return None


def _package(name: str) -> str:
    return f"polycast_{name}"


def _distribution(name: str) -> str:
    return _package(name).strip("_").replace("_", "-")


def _required(version: str) -> str:
    """Return the versions of polycast in which nothing is removed that one version has and does not deprecate."""
    major, minor = map(int, version.split(".")[:2])
    return f">={version},<{major}.{minor + 3}"


def _in_tree(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return name != _privateuse1_name()


class _Standard(Backend):
    """The backend that is written."""

    policies = STANDARD_POLICIES

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type


def _render(name: str) -> dict[Path, str]:
    """Return the contents of the package by path."""
    stem = "".join(part.capitalize() for part in name.split("_"))
    in_tree = _in_tree(name)
    failures = drift_of(_Standard(name)).only_in_torch if in_tree else ()
    names = {
        "device": name,
        "package": _package(name),
        "distribution": _distribution(name),
        "polycast": _required(importlib.metadata.version("polycast")),
        "stem": stem,
        "cls": f"{stem}Backend",
        "failures": "".join(f"{op}  has no policy in policies.py yet: torch's own kernel runs\n" for op in failures),
    }
    naming = _TEMPLATES / f"naming{_SUFFIX}"
    names["naming"] = "" if in_tree else _fill(naming, names)
    contents = {}
    for template in sorted(_TEMPLATES.rglob(f"*{_SUFFIX}")):
        if template != naming:
            first, *rest = template.relative_to(_TEMPLATES).with_suffix("").parts
            contents[Path(names["package"] if first == "package" else first, *rest)] = _fill(template, names)
    return contents


def _fill(template: Path, names: dict[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(names).rstrip("\n") + "\n"


def _write(target: Path, contents: dict[Path, str]) -> None:
    """Write all files or, on an error, none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        whole = Path(folder, "whole")
        for path, text in contents.items():
            (whole / path).parent.mkdir(parents=True, exist_ok=True)
            (whole / path).write_text(text, encoding="utf-8")
        if not target.exists():
            whole.rename(target)
            return
        moved: list[Path] = []  # into the existing directory, which may be the shell's working directory
        try:
            for item in whole.iterdir():
                moved.append(item.rename(target / item.name))
        except OSError:
            for item in moved:
                item.rename(whole / item.name)
            raise
