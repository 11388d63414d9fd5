"""Render the page of a training run as HTML: one page with its own style and script, which loads nothing else."""

import functools
import json

import jinja2

from ...common.versions import versions
from .html import content_policy, dense, environment, part
from .run_page import RunPage


def render(page: RunPage) -> str:
    """Return the HTML of a page."""
    style, script = dense(part("page.css") + part("page_run.css")), dense(part("page_run.js"))
    encoded = json.dumps(page.data, separators=(",", ":")).replace("<", "\\u003c")
    text = _template().render(
        page=page,
        style=style,
        script=script,
        policy=content_policy(script),
        data=encoded,
        version=versions().get("polycast", ""),
    )
    return dense(text) + "\n"


@functools.cache
def _template() -> jinja2.Template:
    return environment().get_template("page_run.html")
