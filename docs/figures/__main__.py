"""Make the figures that say what polycast does on this machine: ``python -m docs.figures`` in the repository's root.

They are what the program says, and docs.pictures draws them. Those of the benchmarks are the JSON of ``make bench``.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from . import observed

FOLDER = Path(__file__).parent
_ABSOLUTE_PATH = re.compile(r"(?<![\w./<])(?:/[\w.+-]+){2,}|\b[A-Za-z]:\\")


def devices() -> str:
    """Return what ``polycast devices --json`` prints here, whatever is set for this shell."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("POLYCAST_")}
    return subprocess.run(
        [sys.executable, "-m", "polycast", "devices", "--json"],
        env=others,
        check=True,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ).stdout


def observation() -> str:
    """Return what is seen of a run here, on one line."""
    return json.dumps(observed.run().to_dict(), separators=(",", ":")) + "\n"


FIGURES = {"devices.json": devices, "observation.json": observation}


def checked(name: str, text: str) -> str:
    """Return a figure's text, which all who read the documentation see.

    Raises:
        ValueError: a path of this machine is in it.
    """
    found = _ABSOLUTE_PATH.search(text)
    if found is not None:
        raise ValueError(f"{name} would name a path of this machine: {found[0]!r}. Run it in the repository's root.")
    return text


def main() -> None:
    """Write each figure, once all are made."""
    made = {name: checked(name, make()) for name, make in FIGURES.items()}
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
