"""``python tools/without_plugins.py FOLDER``: copy what the core and the backends need to be built and tested.

Without plugins/, the entry points of these, and their tests.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = (
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "backends", "core", "pyproject.toml"),
    *(
        "tests/backends",
        "tests/collecting.py",
        "tests/conftest.py",
        "tests/core",
        "tests/engines.py",
        "tests/fixtures_of_processes.py",
        "tests/launcher.py",
        "tools/platform_wheel.py",
    ),
)
_OF_PLUGINS = re.compile(r'^(\[project\.scripts\]|\w+ = "polycast_plugins\b.*|"polycast_plugins\b.*)\n', re.MULTILINE)


def copy(folder: Path) -> None:
    """Copy the files to a folder that does not exist yet, or is empty."""
    for name in KEPT:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source.exists():
            shutil.copy(source, target)
    project = folder / "pyproject.toml"
    text = _OF_PLUGINS.sub("", project.read_text(encoding="utf-8"))
    project.write_text(text.replace('"core", "backends", "plugins"', '"core", "backends"'), encoding="utf-8")


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
