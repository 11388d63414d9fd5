"""What was tried, and how far each trial was off: kept in memory and, if asked for, in a file to go on from."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..policy import files
from .choice import Choice
from .errors import json_number
from .search import Members, OutOfBudget

SCHEMA = 1
StatePath: TypeAlias = str | os.PathLike[str]


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
    """A file with the trials of a search: JSON, written whole after each, so that it is good whenever that ends."""

    def __init__(self, path: StatePath, of: Mapping[str, Any]) -> None:
        """Read the file, if there is one.

        Args:
            path: the file.
            of: what the search is of, by what it is called in the message that says that it is of another.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no state file, of a newer schema, or of another search.
        """
        self._path, self._of = Path(path), dict(of)
        self.order: list[str] | None = None
        self.trials: dict[Choice, Trial] = {}
        if not self._path.exists():
            return
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
            schema, of_file = said["schema"], said["of"]
            if schema == SCHEMA:
                self.order = said["order"]
                for each in said["trials"]:
                    kept = tuple(each.get("kept", ()))
                    trial = Trial(tuple(each["members"]), float(each["distance"]), each.get("error", ""), kept)
                    self.trials[trial.choice] = trial
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"state={os.fspath(path)!r} is not a state file of polycast.tune ({type(error).__name__}: {error}): "
                "remove it to begin anew"
            ) from error
        if schema != SCHEMA:
            raise ValueError(
                f"state={os.fspath(path)!r} is of schema {schema!r}, and this polycast reads schema {SCHEMA}: remove "
                "it to begin anew"
            )
        others = [key for key in {**of_file, **self._of} if of_file.get(key) != self._of.get(key)]
        if others:
            now, then = self._of.get(others[0]), of_file.get(others[0])
            raise ValueError(
                f"state={os.fspath(path)!r} is of another search: its {others[0]} was {then!r}, and is {now!r} now. "
                "Name another file, or remove this one to begin anew."
            )

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
            "of": self._of,
            "order": self.order,
            "trials": [trial.to_dict() for trial in self.trials.values()],
        }
        files.write(self._path, json.dumps(said, indent=1, allow_nan=False) + "\n")


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
