"""Write the README's table of tested versions from pyproject.toml."""

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md",)
_BETWEEN = re.compile(r"(?<=<!-- from pyproject.toml: make docs -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table(tool: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table in Markdown."""
    pythons: dict[str, list[str]] = {}
    for row in tool["matrix"]:
        version = row["torch"].removeprefix("torch").removesuffix(".*").removeprefix("==")
        version = f"the newest, at least {version.removeprefix('>=')}" if version.startswith(">=") else version
        pythons.setdefault(version, []).append(row["python"])
    lines = ["| torch | on Python |", "| --- | --- |"]
    lines += [f"| {torch} | {', '.join(sorted(of, key=lambda each: int(each[2:])))} |" for torch, of in pythons.items()]
    lines += ["", "| platform | engine | |", "| --- | --- | --- |"]
    for row in tool["platforms"]:
        lines.append(f"| {row['platform']} | {row['engine']} | {'tested' if row['tested'] else 'not tested'} |")
    return "\n".join([*lines, ""])


def updated(readme: str) -> str:
    """Return the README with the current table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return _BETWEEN.sub(lambda _: table(project["tool"]["polycast"]), readme)
