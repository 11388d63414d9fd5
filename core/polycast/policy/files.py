"""Policy files: TOML of a known schema, read and written as plain values.

A file holds what a policy is made of, under the same names::

    schema = 1
    name = "BERT, tuned for float16"

    [ops]
    softmax = "fp32"
    linalg_matrix_sqrth = { policy = "fp32", optional = true }  # where the running torch has it

    [modules]
    "encoder.layers.*.norm" = "fp32"
    lm_head = { linear = "fp32" }

    [devices.cuda.ops]
    bmm = "passthrough"
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from .names import nearest

SCHEMA = 1
"""The schema that is written, and the newest that is read."""
TABLES = ("ops", "modules", "devices")

PolicyPath: TypeAlias = str | os.PathLike[str]


def read(path: PolicyPath) -> dict[str, Any]:
    """Return what a policy file says, without the schema.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a policy file, or one of a newer schema.
    """
    # Those who have no file need not import what reads them.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    content = Path(path).read_bytes()
    try:
        said = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: byte {error.start} is {content[error.start]:#04x}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not TOML: {error}") from error
    except RecursionError:
        raise ValueError("its values are nested too deeply to be a policy") from None
    schema = said.pop("schema", None)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ValueError(f"a policy file begins with `schema = {SCHEMA}`, got {schema!r}")
    if schema > SCHEMA:
        raise ValueError(
            f"it is of schema {schema}, and this polycast reads schemas up to {SCHEMA}: install a newer polycast"
        )
    check_keys(said, ("name", *TABLES), "")
    check_tables(said)
    return said


def check_tables(said: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError where something is not the table that it should be."""
    for key in TABLES:
        if not isinstance(said.get(key, {}), Mapping):
            raise ValueError(f"{where}{key} must be a table, got {said[key]!r}")


def check_keys(said: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raise ValueError for a key that means nothing, with the one that may have been meant."""
    for key in said:
        if key not in known:
            alike = nearest(key, known)
            raise ValueError(
                f"it has {where}{key}, which is nothing that a policy has: "
                + (f"did you mean {alike[0]!r}?" if alike else f"expected {', '.join(known)}")
            )


def write(path: PolicyPath, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            whole = Path(folder, target.name)
            whole.write_text(text, encoding="utf-8", newline="\n")
            whole.replace(target)
    except OSError as error:
        if error.filename is None:
            raise
        # It names the file on the way to the one that was asked for.
        raise OSError(error.errno, error.strerror, str(target)) from error


def text_of(said: Mapping[str, Any]) -> str:
    """Return a policy file's text. The order of the rules for modules means something, and so is kept."""
    return "\n".join(_section((), {"schema": SCHEMA, **said}))


def _section(way: tuple[str, ...], said: Mapping[str, Any]) -> list[str]:
    """Return the parts of a file for a table and those below it. In `ops` and `modules` mappings are inline tables."""
    is_table = way and way[-1] in ("ops", "modules") and len(way) % 2 == 1
    plain = {key: value for key, value in said.items() if is_table or not isinstance(value, Mapping)}
    header = f"[{'.'.join(map(_key, way))}]\n" if way else ""
    parts = [header + "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())]
    parts = parts if plain or not said else []
    for key, value in said.items():
        if key not in plain:
            parts += _section((*way, key), value)
    return parts


def _key(key: str) -> str:
    import tomli_w

    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    import tomli_w

    return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")
