"""Write the table of plugins, and of the plugins that each needs, in docs/architecture.md."""

import importlib
import re
from pathlib import Path

from polycast.plugin import Plugin

from .modules import ROOT, summary

PAGES = (Path(__file__).parent / "architecture.md",)
PLUGINS = ROOT / "plugins" / "polycast_plugins"
_BETWEEN = re.compile(r"(?<=<!-- from the manifests: make docs -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| plugin | | needs |", "| --- | --- | --- |"]
    for path in sorted(PLUGINS.glob("*/__init__.py")):
        name = path.parent.name
        manifest = getattr(importlib.import_module(f"polycast_plugins.{name}"), "plugin", Plugin())
        lines.append(f"| `{name}` | {summary(path)} | {', '.join(f'`{need}`' for need in manifest.needs)} |")
    return "\n".join([*lines, ""])


def updated(page: str) -> str:
    """Return the page with the current table."""
    return _BETWEEN.sub(lambda _: table(), page)
