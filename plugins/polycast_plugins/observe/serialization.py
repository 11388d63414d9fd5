"""Convert records to JSON-safe values and back."""

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_R = TypeVar("_R")
_MAX_NUMBER = 2**63


def to_json(record: Any) -> dict[str, Any]:
    """Return the fields of a record as JSON-safe values."""
    return {name: _jsonable(value) for name, value in asdict(record).items()}


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_json(cls: type[_R], values: Mapping[str, Any]) -> _R:
    """Return the record with these fields; unknown fields, which a later version wrote, are ignored.

    Raises:
        TypeError: a value does not fit its field.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"a {cls.__name__} is a mapping, got {type(values).__name__}")
    known: dict[str, Any] = {}
    for name, hint in _hints(cls).items():  # type: ignore[arg-type]
        if name in values:
            if not _fits(values[name], hint):
                raise TypeError(f"{name} of a {cls.__name__} cannot be {values[name]!r:.100}")
            known[name] = _read(values[name], hint)
    return cls(**known)


def _read(value: Any, hint: Any) -> Any:
    """Return a value for a field with a type hint."""
    if is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]
    return tuple(_read(item, get_args(hint)[0]) for item in value) if isinstance(value, (tuple, list)) else value


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value read from JSON fits a type hint, for the hints that records use."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values())
    if origin in (tuple, list):
        return isinstance(value, (tuple, list)) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None:
        return any(_fits(value, each) for each in arguments)
    if is_dataclass(hint):
        return True  # it is read by from_json
    if hint is float and isinstance(value, float):
        return math.isfinite(value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool) and not abs(value) >= _MAX_NUMBER
    return isinstance(value, hint)
