"""`write_package`: a package to edit and publish, made from templates."""

import importlib.metadata
import importlib.util
import keyword
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template

import typer

import polycast
from polycast.plugin import manifests

TEMPLATES = Path(__file__).with_name("templates")
_SUFFIX = ".template"


def names_of(package: str) -> dict[str, str]:
    """Return the names that templates have for a package: of itself, its distribution and its classes."""
    return {
        "package": package,
        "distribution": package.strip("_").replace("_", "-"),
        "stem": "".join(part.capitalize() for part in package.split("_")),
    }


def check_name(name: str) -> dict[str, str]:
    """Return the names for a package that is not the backend of a device, such as ``acme-attention``.

    Raises:
        ValueError: no package, recipe or command can be named so, or there is one.
    """
    names = names_of(name.replace("-", "_"))
    package = names["package"]
    if not re.fullmatch("[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(package):
        raise ValueError(f"{name!r} cannot name a package. Use words in lower case, such as acme-attention.")
    plugins = [{each.name, *each.plugin.recipes, *each.plugin.commands} for each in manifests()]
    taken = {package, names["distribution"]} & set().union(dir(polycast), *plugins)
    if taken or importlib.util.find_spec(f"polycast.{package}"):
        raise ValueError(f"{name!r} names something of polycast or of a plugin already. Choose another name.")
    if package == "tests" or importlib.util.find_spec(package):
        raise ValueError(f"{package!r} is a Python module already, which the package would hide. Choose another name.")
    return names


def write_package(kind: str, names: Mapping[str, str], what: str) -> None:
    """Write a package from the templates of a kind, and print what to do with it.

    It is a new folder here, named as its distribution.

    Args:
        kind: the folder of the templates.
        names: what to replace in them.
        what: the package, in words.

    Raises:
        OSError: it exists, or cannot be written. Nothing is written then.
    """
    target = Path(names["distribution"])
    if target.exists():
        raise FileExistsError(f"{target} exists here already. Move it away, or write the package in another folder.")
    try:
        _write(target.absolute(), _render(kind, names))
    except OSError as error:
        raise OSError(f"{target} cannot be written: {error}") from error
    # pip takes a bare name for one in the package index, which anybody may own there.
    install, test = ["pip", "install", "-e", f"./{target}[test]"], ["pytest", f"./{target}"]
    typer.echo(f"{target}: {what}. Edit it, then: {shlex.join(install)} && {shlex.join(test)}")


def _required(version: str) -> str:
    """Return the versions of polycast in which nothing is removed that one version has and does not deprecate."""
    major, minor = map(int, version.split(".")[:2])
    return f">={version},<{major}.{minor + 3}"


def _render(kind: str, names: Mapping[str, str]) -> dict[Path, str]:
    """Return the contents of the package by path. A template without the suffix of a file is a part of others."""
    known = {"polycast": _required(importlib.metadata.version("polycast")), **names}
    templates = {
        path.relative_to(root).with_suffix(""): path
        for root in (TEMPLATES / "common", TEMPLATES / kind)
        for path in sorted(root.rglob(f"*{_SUFFIX}"))
    }
    parts = [path for path in templates if not path.suffix]
    known = {"pytest": "", **{str(path): _fill(templates[path], known) for path in parts}, **known}
    contents = {}
    for path in templates.keys() - set(parts):
        first, *rest = path.parts
        contents[Path(known["package"] if first == "package" else first, *rest)] = _fill(templates[path], known)
    return contents


def _fill(template: Path, names: Mapping[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(names).rstrip("\n") + "\n"


def _write(target: Path, contents: Mapping[Path, str]) -> None:
    """Write all files or, on an error, none."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        whole = Path(folder, "whole")
        for path, text in contents.items():
            (whole / path).parent.mkdir(parents=True, exist_ok=True)
            (whole / path).write_text(text, encoding="utf-8")
        whole.rename(target)
