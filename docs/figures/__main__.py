"""Record polycast's output on this machine for docs.pictures: ``python -m docs.figures`` in the repository root."""

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
    """Return the output of ``polycast devices --json``, without polycast's environment variables."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("POLYCAST_")}
    return subprocess.run(
        [sys.executable, "-m", "polycast", "devices", "--json"],
        env=others,
        check=True,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ).stdout


def observation() -> str:
    """Return the observation of a run, without the estimates of this machine's profile, as one line of JSON."""
    seen = observed.run().to_dict()
    for row in (row for each in seen["matmuls"] for row in each["rows"]):
        row["estimates"] = {}
    return json.dumps(seen, separators=(",", ":")) + "\n"


FIGURES = {"devices.json": devices, "observation.json": observation}


def checked(name: str, text: str) -> str:
    """Return the text of a figure.

    Raises:
        ValueError: it contains a path of this machine.
    """
    found = _ABSOLUTE_PATH.search(text)
    if found is not None:
        raise ValueError(f"{name} contains a path of this machine: {found[0]!r}. Run it in the repository's root.")
    return text


def main() -> None:
    """Write all figures, or none if one fails."""
    made = {name: checked(name, make()) for name, make in FIGURES.items()}
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
