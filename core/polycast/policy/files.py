"""Read and write policy files, which are TOML.

A file has the arguments of `Policy`, under the same names::

    schema = 1
    name = "BERT, tuned for float16"

    [ops]
    softmax = "fp32"
    linalg_matrix_sqrth = { policy = "fp32", optional = true }  # torch may lack it

    [modules]
    "encoder.layers.*.norm" = "fp32"
    lm_head = { linear = "fp32", output = "float32" }
    "decoder.layers.*" = { recipe = "int8", calibration = "factors.safetensors" }  # beside the policy file

    [devices.cuda.ops]
    bmm = "passthrough"
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import library
from .names import hint
from .recipe import find_kind

SCHEMA = 1
"""The schema of written files, and the newest that can be read."""
TABLES = ("ops", "modules", "devices")
RECIPE = "recipe"
"""The key that makes a table among the rules for modules a recipe."""

PolicyPath: TypeAlias = str | os.PathLike[str]


def read(path: PolicyPath) -> dict[str, Any]:
    """Return the tables of a policy file, without the schema.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a policy file, or one of a newer schema.
    """
    content = Path(path).read_bytes()
    try:
        return of_text(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: byte {error.start} is {content[error.start]:#04x}") from error


def of_text(text: str) -> dict[str, Any]:
    """Return the tables in the text of a policy file, without the schema.

    Raises:
        ValueError: it is not that of a policy file, or of a newer schema.
    """
    tomllib = library("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not TOML: {error}") from error
    except RecursionError:
        raise ValueError("its values are nested too deeply to be a policy") from None
    schema = table.pop("schema", None)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ValueError(f"a policy file begins with `schema = {SCHEMA}`, got {schema!r}")
    if schema > SCHEMA:
        raise ValueError(
            f"it has schema {schema}, and this polycast reads schemas up to {SCHEMA}: install a newer polycast"
        )
    check_keys(table, ("name", *TABLES), "")
    check_tables(table)
    return table


def check_tables(table: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError if a value that should be a table is not."""
    for key in TABLES:
        if not isinstance(table.get(key, {}), Mapping):
            raise ValueError(f"{where}{key} must be a table, got {table[key]!r}")


def with_absolute_paths(table: Mapping[str, Any], path: PolicyPath) -> dict[str, Any]:
    """Return the tables of a policy file with the paths in it made absolute.

    They begin at the folder of the file, also if `path` is a symbolic link to it. What is not there is looked for
    beside the link: the files of a folder may be links to files of other names elsewhere.
    """
    folders = [os.path.dirname(find(path)) for find in (os.path.realpath, os.path.abspath)]

    def absolute(each: str) -> str:
        places = [os.path.join(folder, each) for folder in folders]
        return next((place for place in places if os.path.exists(place)), places[0])

    return _with_paths(table, absolute)


def with_relative_paths(table: Mapping[str, Any], path: PolicyPath) -> dict[str, Any]:
    """Return tables for a policy file, with the paths in it made relative to its folder where that is possible."""
    folder = os.path.dirname(os.path.realpath(path))

    def relative(each: str) -> str:
        parent, name = os.path.split(os.path.abspath(each))  # `..` is relative to the folder that a link points to
        try:
            return Path(os.path.relpath(os.path.join(os.path.realpath(parent), name), folder)).as_posix()
        except ValueError:  # another drive of Windows
            return each

    return _with_paths(table, relative)


def _with_paths(table: Mapping[str, Any], convert: Callable[[str], str]) -> dict[str, Any]:
    def converted(rule: Any) -> Any:
        kind = find_kind(str(rule[RECIPE]).partition(":")[0]) if isinstance(rule, Mapping) and RECIPE in rule else None
        paths = () if kind is None else [name for name in kind.loaders if isinstance(rule.get(name), str)]
        return {**rule, **{name: convert(rule[name]) for name in paths}} if paths else rule

    changed = dict(table)
    if isinstance(table.get("modules"), Mapping):
        changed["modules"] = {key: converted(rule) for key, rule in table["modules"].items()}
    if isinstance(table.get("devices"), Mapping):
        changed["devices"] = {
            device: _with_paths(part, convert) if isinstance(part, Mapping) else part
            for device, part in table["devices"].items()
        }
    return changed


def check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raise ValueError for an unknown key, with the nearest known one."""
    for key in table:
        if key not in known:
            raise ValueError(f"{where}{key} is not a key of a policy: {hint(key, known)}")


def to_text(table: Mapping[str, Any]) -> str:
    """Return the text of a policy file. The rules for modules keep their order, which matters."""
    return "\n".join(_sections((), {"schema": SCHEMA, **table}))


def _sections(path: tuple[str, ...], table: Mapping[str, Any]) -> list[str]:
    """Return the sections of a table and its subtables. In `ops` and `modules` tables are written inline."""
    is_inline = path and path[-1] in ("ops", "modules") and len(path) % 2 == 1
    values = {key: value for key, value in table.items() if is_inline or not isinstance(value, Mapping)}
    header = f"[{'.'.join(map(_key, path))}]\n" if path else ""
    sections = [header + "".join(f"{_key(key)} = {_value(value)}\n" for key, value in values.items())]
    sections = sections if values or not table else []
    for key, value in table.items():
        if key not in values:
            sections += _sections((*path, key), value)
    return sections


def _key(key: str) -> str:
    text: str = library("tomli_w").dumps({key: 0})
    return text.removesuffix(" = 0\n")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    text: str = library("tomli_w").dumps({"x": value})
    return text.removeprefix("x = ").removesuffix("\n")
