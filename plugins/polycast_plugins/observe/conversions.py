"""Convert records to JSON and back and to scalars for TensorBoard and the like."""

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

from .facts import SHARES, Facts
from .findings import findings_of
from .recorder import NumericsRow
from .records import NumericsRecord
from .steps import NUMBERS, StepRecord, jsonable

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
    if isinstance(value, (tuple, list)):
        return tuple(_read(item, get_args(hint)[0]) for item in value)
    optional: Any = next(filter(is_dataclass, get_args(hint)), None)
    return value if value is None or optional is None else from_json(optional, value)


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


_PREFIX = "polycast/"


@runtime_checkable
class ScalarWriter(Protocol):
    """Anything with torch's ``SummaryWriter.add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Write a scalar."""


class BatchWriter:
    """The base of writers that write the scalars of a step at once."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Write a scalar of a step."""
        self.add_scalars_of_step({tag: scalar_value}, global_step or 0)

    def add_scalars_of_step(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars of a step."""
        raise NotImplementedError


Writer: TypeAlias = ScalarWriter | str | os.PathLike[str]


def check_writer(writer: Any) -> None:
    """Raise TypeError unless something is a writer."""
    if not isinstance(writer, (str, os.PathLike)) and not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            "writer must be the path of a file for JSON lines or have add_scalar(tag, value, step), as torch.utils."
            "tensorboard.SummaryWriter and polycast_plugins.integrations.wandb.WandbWriter have, got "
            f" {type(writer).__name__}"
        )


def write_scalars(writer: Writer, scalars: Mapping[str, float], step: int) -> None:
    """Write scalars of a step; to a file, as a JSON line with ``"step"``, where inf and nan are text."""
    if isinstance(writer, (str, os.PathLike)):
        safe = {tag: jsonable(value) for tag, value in scalars.items()}
        with Path(writer).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **safe}, allow_nan=False) + "\n")
        return
    tagged = {_PREFIX + tag: float(value) for tag, value in scalars.items()}
    if isinstance(writer, BatchWriter):
        writer.add_scalars_of_step(tagged, step)
        return
    for tag, value in tagged.items():
        writer.add_scalar(tag, value, step)


def scalars_of(facts: Facts) -> dict[str, float]:
    """Return the scalars of an observation, without those that it lacks."""
    total, gradients = facts.total, [each for each in facts.numerics if each.role == "backward"]
    scalars = {
        **{name: getattr(facts, name) for name in SHARES},
        "ops": total.calls,
        "casts": total.casts,
        "cast_bytes": total.cast_bytes,
        "weights_cast_again": total.recasts,
        "cached_casts_used": total.hits,
        "findings": len(findings_of(facts)),
        "seconds": facts.run.seconds,
        "underflow_share": share_of(facts.numerics, "underflowed"),
        "gradient_underflow_share": share_of(gradients, "underflowed"),
        "overflow_share": share_of(facts.numerics, "overflowed"),
    }
    return {tag: value for tag, value in scalars.items() if value is not None}


def scalars_of_step(record: StepRecord) -> dict[str, float]:
    """Return the scalars of a step, without those that were not recorded."""
    scalars = {name: getattr(record, name) for name in (*NUMBERS, "skipped")}
    return {tag: float(value) for tag, value in scalars.items() if value is not None}


def share_of(numerics: Sequence[NumericsRecord | NumericsRow], name: str) -> float | None:
    """Return the share of values that underflowed or overflowed; None: none were counted."""
    count = sum(each.count for each in numerics)
    return sum(getattr(each, name) for each in numerics) / count if count else None
