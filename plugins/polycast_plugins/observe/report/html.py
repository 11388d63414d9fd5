"""Render reports and pages of training runs as HTML, each with its own style and script. They load nothing else."""

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from importlib import resources

import jinja2

from polycast.common.versions import versions

from ..matmuls import matmul_lines
from ..units import percent, size
from .data import data_of
from .page import PHASES, Page
from .run_page import RunPage
from .words import duration, in_order, pattern, ruled

_NAMES = ("before", "after")
_MAX_MODULES = 200
"""The number of modules shown without script."""
_MAX_PLACES = 50
_MAX_ROWS = 100


def render(page: Page) -> str:
    """Return the HTML of a report."""
    data = data_of(page)
    scripts = ("page.js", "page_modules.js", "page_ops.js")
    return _render("page.html", ["page.css"], scripts, data.json, page=page, stacks=data.stacks)


def render_run(page: RunPage) -> str:
    """Return the HTML of the page of a training run."""
    version = versions().get("polycast", "")
    return _render(
        "page_run.html", ["page.css", "page_run.css"], ["page_run.js"], page.data, page=page, version=version
    )


def _render(template: str, styles: Sequence[str], scripts: Sequence[str], data: object, **context: object) -> str:
    style, script = (_dense("".join(map(_part, names))) for names in (styles, ["base.js", *scripts]))
    text = (
        _environment()
        .get_template(template)
        .render(
            style=style,
            script=script,
            policy=_content_policy(script),
            # A script element ends at the first "</script", so the data must not contain "<".
            data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
            **context,
        )
    )
    return _dense(text) + "\n"


def _dense(text: str) -> str:
    """Return a text without empty lines, of which templates make many."""
    return "\n".join(line for line in text.split("\n") if line and not line.isspace())


@functools.cache
def _environment() -> jinja2.Environment:
    """Return an environment that escapes names of modules, ops and files, which the program chooses."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
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
        matmul_lines=matmul_lines,
        kind_title=lambda kind: kind.replace("_", " ").capitalize(),
        short=lambda op: op.removeprefix("aten::"),
    )
    made.globals.update(
        phases=PHASES, names=_NAMES, most_modules=_MAX_MODULES, most_places=_MAX_PLACES, most_rows=_MAX_ROWS
    )
    return made


@functools.cache
def _part(name: str) -> str:
    """Return the text of a file of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _content_policy(script: str) -> str:
    """Return a Content-Security-Policy that allows the page its own script and styles, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
