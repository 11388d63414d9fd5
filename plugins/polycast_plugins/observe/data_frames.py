"""Convert records to pandas DataFrames."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from .facts import LISTS
from .step_record import NUMBERS, StepRecord

TABLES = (*LISTS, "findings")


def _pandas(method: str, instead: str) -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError(
            f"{method} needs pandas, which cannot be imported ({error}). Install it with pip install pandas, or use "
            f"{instead}, which has the same data."
        ) from error


def frame_of(records: Iterable[Any]) -> Any:
    """Return a DataFrame with a row for each record; see ``Observation.to_pandas``.

    Raises:
        ImportError: pandas is not installed.
    """
    pandas = _pandas("Observation.to_pandas", "to_dict()")
    return pandas.DataFrame([dict(_columns(asdict(record))) for record in records])


def _columns(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _columns(value, f"{prefix}{name}.")
        elif not (isinstance(value, (tuple, list)) and any(isinstance(item, Mapping) for item in value)):
            yield prefix + name, value


def frame_of_steps(steps: Iterable[StepRecord]) -> Any:
    """Return a DataFrame with a row for each step; see ``RunHistory.to_pandas``.

    Raises:
        ImportError: pandas is not installed.
    """
    pandas = _pandas("RunHistory.to_pandas", "steps")
    rows = [
        {
            **{name: getattr(record, name) for name in ("step", *NUMBERS, "skipped")},
            "parameters": "" if record.skip is None else ", ".join(record.skip.parameters),
            "origin": "" if record.skip is None or record.skip.origin is None else record.skip.origin.text,
        }
        for record in steps
    ]
    columns = ["step", *NUMBERS, "skipped", "parameters", "origin"]
    frame = pandas.DataFrame(rows, columns=columns).set_index("step")
    return frame.astype(dict.fromkeys(NUMBERS, "float64") | {"skipped": "boolean"})
