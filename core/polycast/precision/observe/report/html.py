"""A report as HTML: one page that holds its own style and script, and runs and loads nothing else."""

import base64
import functools
import hashlib
from importlib import resources

import jinja2

from ..units import size
from .page import PHASES, Page

_PATTERNS = {"bfloat16": "d0", "float16": "d1", "float32": "d2", "float64": "d3"}
_OTHER = "d4"
_RULES = {"none": "no rule"}
_NAMES = ("before", "after")


def render(page: Page) -> str:
    """Return the text of a page."""
    style, script = _dense(_part("page.css")), _dense(_part("page.js"))
    return _dense(_template().render(page=page, style=style, script=script, policy=_content_policy(script))) + "\n"


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
        duration=_duration,
        pattern=lambda dtype: _PATTERNS.get(dtype, _OTHER),
        in_order=lambda counts: sorted(counts.items(), key=lambda each: _PATTERNS.get(each[0], _OTHER)),
        each=lambda of, name: [None if record is None else getattr(record, name) for record in of],
        alike=lambda values: all(value == values[0] for value in values),
        ruled=lambda op: " ".join(filter(None, (_RULES.get(op.rule, op.rule), op.rule_name))),
        headline=lambda kind: kind.replace("_", " ").capitalize(),
        short=lambda op: op.removeprefix("aten::"),
    )
    environment.globals.update(phases=PHASES, names=_NAMES)
    return environment.get_template("page.html")


@functools.cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _content_policy(script: str) -> str:
    """Return what the browser is to allow the page: its own script, styles, and nothing from anywhere else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"
