"""What was tried, and how far each trial was off: kept in memory and, if asked for, in a file to go on from."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..policy import files
from .choice import Choice
from .digest import Part
from .errors import json_number
from .fingerprint import Fingerprint, Varying, of_table
from .search import Members, OutOfBudget

SCHEMA = 1
StatePath: TypeAlias = str | os.PathLike[str]
_SHOWN = 3
"""How many of the differences between two searches are named."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Trial:
    """One evaluation.

    Attributes:
        members: what was in float32.
        distance: how far the output was from float32's; inf where it was not finite, or could not be had.
        error: what the model raised; empty where it ran.
        kept: what had left the recipe for the fast dtype, where there is a recipe.
    """

    members: Members
    distance: float
    error: str = ""
    kept: Members = ()

    @property
    def choice(self) -> Choice:
        """What was where."""
        return Choice(self.members, self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        said: dict[str, Any] = {"members": list(self.members), "distance": json_number(self.distance)}
        said |= {"error": self.error} if self.error else {}
        return {**said, "kept": list(self.kept)} if self.kept else said


class Trials:
    """Evaluates choices, each once, as long as the budget lasts.

    What a file holds of an earlier search is not evaluated again, and counts as if it were: a search that goes on from
    a file takes the way of one that was never interrupted.
    """

    def __init__(self, evaluate: Callable[[Choice], Trial], budget: int, file: "StateFile | None") -> None:
        self.made: dict[Choice, Trial] = {}
        self._evaluate, self._budget, self._file = evaluate, budget, file
        self._known = {} if file is None else dict(file.trials)

    def of(self, choice: Choice) -> Trial:
        """Return the trial of a choice.

        Raises:
            OutOfBudget: there was none yet, and the budget is spent.
        """
        if choice not in self.made:
            if len(self.made) >= self._budget:
                raise OutOfBudget
            trial = self._known.get(choice)
            if trial is None:
                trial = self._evaluate(choice)
                if self._file is not None:
                    self._file.add(trial)
            self.made[choice] = trial
        return self.made[choice]


class StateFile:
    """A file with the trials of a search: JSON, written whole after each, so that it is good whenever that ends.

    Attributes:
        order: the order in which the search takes its candidates; None where it is not known yet.
        trials: the trials, by what was where.
    """

    def __init__(self, path: StatePath, of: Mapping[str, Any], fingerprint: Fingerprint) -> None:
        """Read the file, if there is one.

        Args:
            path: the file.
            of: what the search is of, by what it is called in the message that says that it is of another.
            fingerprint: the digests of the model, its inputs and the metric.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no state file, of a newer schema, or of another search.
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
                f"state={self._text!r} is not a state file of polycast.tune ({problem}): remove it to begin anew"
            ) from error
        if content.schema != SCHEMA:
            raise ValueError(
                f"state={self._text!r} is of schema {content.schema!r}, and this polycast reads schema {SCHEMA}: "
                "remove it to begin anew"
            )
        self._varying = content.varying
        difference = _difference(content.of, self._of())
        if not difference:
            self.order, self.trials = content.order, {trial.choice: trial for trial in content.trials}
        elif content.trials:
            raise self._of_another_search(difference)
        else:  # nothing was evaluated in the other search
            self._varying = set()

    def _of(self) -> dict[str, Any]:
        return {**self._fingerprint.digests(self._varying), **self._plain}

    def _of_another_search(self, difference: str) -> ValueError:
        return ValueError(f"state={self._text!r} is of another search: {difference}")

    def check_names(self, names: Sequence[str], over: str) -> None:
        """Check that the file is about the candidates of the search.

        Raises:
            ValueError: it is not.
        """
        order = names if self.order is None else self.order
        used = {name for choice in self.trials for name in (*choice.members, *choice.kept)}
        others = sorted({*order, *used} ^ {*names})
        if others or len(order) != len(names):
            what = f"{others[0]!r} is in one of them only" if others else "it has one twice"
            raise self._of_another_search(
                f"the {over} that it names are not those that the model calls; {what}. Name another file, or remove "
                "this one to begin anew."
            )

    def check_again(self, choice: Choice, evaluate: Callable[[Choice], Trial]) -> None:
        """Evaluate a choice whose trial is in the file again, if there is one.

        Raises:
            ValueError: its distance is another one. Where it is another one each time, it has to be within ten times
                the difference of two evaluations.
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
                f"the distance of the region without a policy was {known.distance:.6g}, and is {now:.6g} now. "
                "Something differs that no digest is of, such as a file that the model reads, the state of the random "
                "number generators, or another library. Name another file, or remove this one to begin anew."
            )

    def note_evaluation(self) -> None:
        """Leave out of the digests what the first evaluation changes, such as a counter of calls."""
        if not self._is_evaluated:
            self._is_evaluated = True
            self._varying |= self._fingerprint.varying()

    def set_order(self, order: Sequence[str]) -> None:
        """Keep the order in which the search takes its candidates."""
        self.order = list(order)
        self._write()

    def add(self, trial: Trial) -> None:
        """Keep a trial."""
        self.trials[trial.choice] = trial
        self._write()

    def _write(self) -> None:
        said = {
            "schema": SCHEMA,
            "of": self._of(),
            "varying": sorted([what, *part] for what, part in self._varying),
            "order": self.order,
            "trials": [trial.to_dict() for trial in self.trials.values()],
        }
        files.write(self._path, json.dumps(said, indent=1, allow_nan=False) + "\n")


class _Content(NamedTuple):
    """What a state file says; of another schema, nothing but that."""

    schema: int
    of: dict[str, Any]
    varying: Varying
    order: list[str] | None
    trials: list[Trial]

    @classmethod
    def read(cls, text: str) -> "_Content":
        """Read a file's text.

        Raises:
            ValueError: it does not say what a state file says.
            RecursionError: it is nested too deeply.
        """
        said = _of_type(dict, json.loads(text), "the file")
        schema = _of_type(int, _item(said, "schema"), "its schema")
        of = _of_type(dict, _item(said, "of"), "its 'of'")
        if schema != SCHEMA:
            return cls(schema, of, set(), None, [])
        order = _item(said, "order")
        varying: Varying = set()
        for each in _of_type(list, said.get("varying", []), "its 'varying'"):
            what, owner, name = _names(each, "an item of its 'varying'", 3)
            varying.add((what, Part(owner, name)))
        return cls(
            schema,
            of,
            varying,
            None if order is None else list(_names(order, "its 'order'")),
            [_trial(each) for each in _of_type(list, _item(said, "trials"), "its 'trials'")],
        )


def _trial(said: object) -> Trial:
    trial = _of_type(dict, said, "a trial")
    members, kept = _names(_item(trial, "members"), "'members'"), _names(trial.get("kept", []), "'kept'")
    distance = _item(trial, "distance")
    if distance == "inf":
        distance = math.inf
    if isinstance(distance, bool) or not isinstance(distance, (int, float)) or distance != distance:
        raise ValueError(f"a distance must be a number or 'inf', got {distance!r}")
    try:
        return Trial(members, float(distance), _of_type(str, trial.get("error", ""), "an 'error'"), kept)
    except OverflowError as error:
        raise ValueError("a distance is too large a number") from error


def _item(said: Mapping[str, Any], key: str) -> Any:
    if key not in said:
        raise ValueError(f"it has no {key!r}")
    return said[key]


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
    """Return in what two searches differ; nothing if they do not."""
    for key in {**now, **then}:
        was, is_now = then.get(key), now.get(key)
        if was == is_now:
            continue
        where = ""
        if isinstance(was, dict) and isinstance(is_now, dict):
            others = [name for name in {**is_now, **was} if was.get(name) != is_now.get(name)]
            shown = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
            where = f" What differs: {shown}."
            was, is_now = (of_table(each.items()) for each in (was, is_now))
        return (
            f"its {key} was {was!r}, and is {is_now!r} now. Name another file, or remove this one to begin anew.{where}"
        )
    return ""


def distance_of(value: object) -> float:
    """Return what a metric returned as a number; what is not finite is infinitely far.

    Raises:
        TypeError: it is no number.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"metric must return a number, the distance of the output from the reference; got {type(value).__name__}"
        ) from error
    return number if math.isfinite(number) else math.inf
