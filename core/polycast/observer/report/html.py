"""Render a report as HTML: one page with its own style and script, which loads nothing else."""

import base64
import functools
import hashlib
import json
from importlib import resources

import jinja2

from ..units import percent, size
from .data import data_of
from .page import PHASES, Page
from .words import duration, in_order, pattern, ruled

_SCRIPTS = ("page.js", "page_modules.js", "page_ops.js")
"""The parts of the page's script, in order: the later ones use the first."""
_NAMES = ("before", "after")
_MOST_MODULES = 200
"""The number of modules shown without script."""
_MOST_PLACES = 50
_MOST_ROWS = 100


def render(page: Page) -> str:
    """Return the HTML of a page."""
    style, script = dense(part("page.css")), dense("".join(map(part, _SCRIPTS)))
    data = data_of(page)
    # A script element ends at the first "</script", so the data must not contain "<".
    encoded = json.dumps(data.json, separators=(",", ":")).replace("<", "\\u003c")
    policy = content_policy(script)
    text = _template().render(page=page, style=style, script=script, policy=policy, data=encoded, stacks=data.stacks)
    return dense(text) + "\n"


def dense(text: str) -> str:
    """Return a text without empty lines, of which templates make many."""
    return "\n".join(line for line in text.split("\n") if line and not line.isspace())


def environment() -> jinja2.Environment:
    """Return an environment that escapes names of modules, ops and files, which the program chooses."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(part),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


@functools.cache
def _template() -> jinja2.Template:
    made = environment()
    made.filters.update(
        size=size,
        count="{:,}".format,
        percent="{:.0%}".format,
        share=percent,
        magnitude="{:.3g}".format,
        duration=duration,
        pattern=pattern,
        in_order=in_order,
        each=lambda of, name: [None if record is None else getattr(record, name) for record in of],
        alike=lambda values: all(value == values[0] for value in values),
        ruled=ruled,
        headline=lambda kind: kind.replace("_", " ").capitalize(),
        short=lambda op: op.removeprefix("aten::"),
    )
    made.globals.update(
        phases=PHASES, names=_NAMES, most_modules=_MOST_MODULES, most_places=_MOST_PLACES, most_rows=_MOST_ROWS
    )
    return made.get_template("page.html")


@functools.cache
def part(name: str) -> str:
    """Return the text of a file of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def content_policy(script: str) -> str:
    """Return a Content-Security-Policy that allows the page its own script and styles, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
