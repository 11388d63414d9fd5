"""Write observations and steps as scalars, to TensorBoard and the like or as JSON lines."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from polycast.common.strict_json import jsonable

from .facts import Facts
from .findings import findings_of
from .numerics_records import NumericsRecord
from .step_record import NUMBERS, StepRecord

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
    """Check that something is a writer.

    Raises:
        TypeError: it is none.
    """
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
    total = facts.total
    scalars = {
        "fast_share": facts.fast_share,
        "fast_time_share": facts.fast_time_share,
        "recipe_share": facts.recipe_share,
        "ops": total.calls,
        "casts": total.casts,
        "cast_bytes": total.cast_bytes,
        "weights_cast_again": total.recasts,
        "cached_casts_used": total.hits,
        "findings": len(findings_of(facts)),
        "seconds": facts.run.seconds,
        "underflow_share": share_of(facts.numerics, "underflowed"),
        "gradient_underflow_share": share_of(facts.numerics, "underflowed", "backward"),
        "overflow_share": share_of(facts.numerics, "overflowed"),
    }
    return {tag: value for tag, value in scalars.items() if value is not None}


def scalars_of_step(record: StepRecord) -> dict[str, float]:
    """Return the scalars of a step, without those that were not recorded."""
    scalars = {name: getattr(record, name) for name in (*NUMBERS, "skipped")}
    return {tag: float(value) for tag, value in scalars.items() if value is not None}


def share_of(numerics: Iterable[NumericsRecord], name: str, role: str | None = None) -> float | None:
    """Return the share of values that underflowed or overflowed, in one pass or both; None: none were counted."""
    records = [record for record in numerics if role is None or record.role == role]
    count = sum(record.count for record in records)
    return sum(getattr(record, name) for record in records) / count if count else None
