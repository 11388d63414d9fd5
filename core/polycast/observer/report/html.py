"""A report as HTML: one page that holds its own style and script, and runs and loads nothing else."""

import base64
import functools
import hashlib
import json
from importlib import resources

import jinja2

from ..units import size
from .data import data_of
from .page import PHASES, Page
from .words import duration, in_order, pattern, ruled

_NAMES = ("before", "after")
_MOST_MODULES = 200
"""How many modules are shown where no script runs."""
_MOST_PLACES = 50
_MOST_ROWS = 100


def render(page: Page) -> str:
    """Return the text of a page."""
    style, script = _dense(_part("page.css")), _dense(_part("page.js"))
    data = data_of(page)
    # What is in a script element ends at the first "</script": there is no "<" in it, and so no tag either.
    said = json.dumps(data.said, separators=(",", ":")).replace("<", "\\u003c")
    policy = _content_policy(script)
    text = _template().render(page=page, style=style, script=script, policy=policy, data=said, stacks=data.stacks)
    return _dense(text) + "\n"


def _dense(text: str) -> str:
    """Return a text without its empty lines, of which templates make many."""
    return "\n".join(line for line in text.split("\n") if line and not line.isspace())


@functools.cache
def _template() -> jinja2.Template:
    # Whatever comes from the model is escaped: names of modules and ops, places in the program.
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        size=size,
        count="{:,}".format,
        percent="{:.0%}".format,
        duration=duration,
        pattern=pattern,
        in_order=in_order,
        each=lambda of, name: [None if record is None else getattr(record, name) for record in of],
        alike=lambda values: all(value == values[0] for value in values),
        ruled=ruled,
        headline=lambda kind: kind.replace("_", " ").capitalize(),
        short=lambda op: op.removeprefix("aten::"),
    )
    environment.globals.update(
        phases=PHASES, names=_NAMES, most_modules=_MOST_MODULES, most_places=_MOST_PLACES, most_rows=_MOST_ROWS
    )
    return environment.get_template("page.html")


@functools.cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _content_policy(script: str) -> str:
    """Return what the browser is to allow the page: its own script, styles, and nothing from anywhere else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
