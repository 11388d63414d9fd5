"""The file of a search: its trials, and what identifies the search, so that an interrupted one can continue."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..common.plain_text import first_of
from ..policy import files
from .fingerprint import Fingerprint, Part, Varying, hash_of_table
from .minimal_set import Choice, Members
from .trials import Trial

SCHEMA = 1
StatePath: TypeAlias = str | os.PathLike[str]
_REMEDY = "Name another file, or remove this one to start over."
_T = TypeVar("_T")


class StateFile:
    """A JSON file with the trials of a search, rewritten after each trial.

    Attributes:
        order: the order of the candidates; None if it is not known yet.
        trials: the trials, by choice.
    """

    def __init__(self, path: StatePath, of: Mapping[str, Any], fingerprint: Fingerprint) -> None:
        """Read the file, if it exists.

        Args:
            path: the file.
            of: what identifies the search besides the fingerprint, by name.
            fingerprint: the digests of the model, its inputs and the metric.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a state file, has a newer schema, or belongs to another search.
        """
        self._path, self._text = Path(path), os.fspath(path)
        self._plain, self._fingerprint = dict(of), fingerprint
        self._varying: Varying = set()
        self._is_evaluated = False
        self.order: list[str] | None = None
        self.trials: dict[Choice, Trial] = {}
        if not self._path.exists():
            return
        try:
            content = _Content.read(self._path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(
                f"state={self._text!r} is not a state file of polycast.tune ({problem}): remove it to start over"
            ) from error
        if content.schema != SCHEMA:
            raise ValueError(
                f"state={self._text!r} is of schema {content.schema!r}, and this polycast reads schema {SCHEMA}: "
                "remove it to start over"
            )
        self._varying = content.varying
        difference = _difference(content.of, self._of())
        if not difference:
            self.order, self.trials = content.order, {trial.choice: trial for trial in content.trials}
        elif content.trials:
            raise self._of_another_search(difference)
        else:  # the other search has no trials
            self._varying = set()

    def _of(self) -> dict[str, Any]:
        return {**self._fingerprint.digests(self._varying), **self._plain}

    def _of_another_search(self, difference: str) -> ValueError:
        return ValueError(f"state={self._text!r} belongs to another search: {difference}")

    def check_names(self, names: Sequence[str], over: str) -> None:
        """Check that the file has the candidates of the search.

        Raises:
            ValueError: it has others.
        """
        order = names if self.order is None else self.order
        used = {name for choice in self.trials for name in (*choice.members, *choice.in_fast_dtype)}
        others = sorted({*order, *used} ^ {*names})
        if others or len(order) != len(names):
            what = f"{others[0]!r} is in one of them only" if others else "one is there twice"
            raise self._of_another_search(f"its {over} are not the {over} that the model calls; {what}. {_REMEDY}")

    def check_again(self, choice: Choice, evaluate: Callable[[Choice], Trial]) -> None:
        """Repeat the trial of a choice, if the file has one.

        Raises:
            ValueError: the distance differs; if it differs each time, by over ten times as much as two evaluations.
        """
        known = self.trials.get(choice)
        if known is None:
            return
        now = evaluate(choice).distance
        if now == known.distance:
            return
        again = evaluate(choice).distance
        if again == now or not abs(known.distance - now) <= 10 * abs(again - now):
            raise self._of_another_search(
                f"the distance in the region without a policy was {known.distance:.6g}, and is {now:.6g} now. "
                "Something outside of the model differs, such as a file that it reads, the state of the random number "
                f"generators, or another library. {_REMEDY}"
            )

    def note_evaluation(self) -> None:
        """Exclude the parts that the first evaluation changes, such as a counter of calls, from the digests."""
        if not self._is_evaluated:
            self._is_evaluated = True
            self._varying |= self._fingerprint.varying()

    def set_order(self, order: Sequence[str]) -> None:
        """Save the order of the candidates."""
        self.order = list(order)
        self._write()

    def add(self, trial: Trial) -> None:
        """Save a trial."""
        self.trials[trial.choice] = trial
        self._write()

    def _write(self) -> None:
        data = {
            "schema": SCHEMA,
            "of": self._of(),
            "varying": sorted([what, *part] for what, part in self._varying),
            "order": self.order,
            "trials": [trial.to_dict() for trial in self.trials.values()],
        }
        files.write(self._path, json.dumps(data, indent=1, allow_nan=False) + "\n")


class _Content(NamedTuple):
    """The contents of a state file; empty for another schema."""

    schema: int
    of: dict[str, Any]
    varying: Varying
    order: list[str] | None
    trials: list[Trial]

    @classmethod
    def read(cls, text: str) -> "_Content":
        """Parse the text of a file.

        Raises:
            ValueError: it is not that of a state file.
            RecursionError: it is nested too deeply.
        """
        data = _of_type(dict, json.loads(text), "the file")
        schema = _of_type(int, _item(data, "schema"), "its schema")
        of = _of_type(dict, _item(data, "of"), "its 'of'")
        if schema != SCHEMA:
            return cls(schema, of, set(), None, [])
        order = _item(data, "order")
        varying: Varying = set()
        for each in _of_type(list, data.get("varying", []), "its 'varying'"):
            what, owner, name = _names(each, "an item of its 'varying'", 3)
            varying.add((what, Part(owner, name)))
        return cls(
            schema,
            of,
            varying,
            None if order is None else list(_names(order, "its 'order'")),
            [_trial(each) for each in _of_type(list, _item(data, "trials"), "its 'trials'")],
        )


def _trial(data: object) -> Trial:
    trial = _of_type(dict, data, "a trial")
    members, kept = _names(_item(trial, "members"), "'members'"), _names(trial.get("kept", []), "'kept'")
    distance = _distance(_item(trial, "distance"))
    distances = tuple(map(_distance, _of_type(list, trial.get("distances", []), "'distances'")))
    return Trial(members, distance, _of_type(str, trial.get("error", ""), "an 'error'"), kept, distances)


def _distance(value: object) -> float:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"a distance must be a number or 'inf', got {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("a distance is too large a number") from error


def _item(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        raise ValueError(f"it has no {key!r}")
    return data[key]


def _of_type(kind: type[_T], value: object, what: str) -> _T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{what} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _names(value: object, what: str, length: int | None = None) -> Members:
    names: list[Any] = _of_type(list, value, what)
    if not all(isinstance(name, str) for name in names) or length not in (None, len(names)):
        raise ValueError(f"{what} must be a list of {'' if length is None else f'{length} '}texts, got {value!r}")
    return tuple(names)


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first difference between two searches, or an empty text."""
    for key in {**now, **then}:
        was, is_now = then.get(key), now.get(key)
        if was == is_now:
            continue
        where = ""
        if isinstance(was, dict) and isinstance(is_now, dict):
            others = [name for name in {**is_now, **was} if was.get(name) != is_now.get(name)]
            where = f" Differences: {first_of(others)}."
            was, is_now = (hash_of_table(each.items()) for each in (was, is_now))
        return f"its {key} was {was!r}, and is {is_now!r} now. {_REMEDY}{where}"
    return ""
