"""HTML pages of observations and training runs, each with its own style and script. They load nothing else."""

import base64
import functools
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from polycast import __version__
from polycast.errors import library

from .. import text as written
from ..records import Counts, Module, Op
from .page import PHASES, ModuleRow, OpRow, Page
from .page import page_of as page_of
from .run_page import RunPage
from .run_page import run_page_of as run_page_of

_NOTHING = -1
"""Stands for a number that the run lacks."""


class PageData:
    """The input of a page's script.

    Attributes:
        json: JSON-safe. ``words``: written. ``patterns``: the CSS class of each dtype, by the number of its text.
            ``ops``: rows of ops, each ``[op, phase, policy, rule, of]``, where `of` has for each run
            ``[calls, dtypes, casts, bytes]``. ``modules``, in tree order: ``[depth, name, kind, changed, open, ops,
            of]``, with the name relative to the enclosing module; `of` has for each run ``[dtypes, time, casts, share,
            bytes, share, rule]``, with shares in per cent. ``lines``: lines of stacks. ``stacks``: lists of their
            numbers. dtypes are ``[dtype, count, dtype, count, ...]``.
        stacks: the numbers of the stacks, by stack.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._words: dict[str, int] = _numbers()
        self._ops: dict[tuple[Any, ...], int] = _numbers()
        self._patterns: dict[int, str] = {}
        lines: dict[str, int] = _numbers()
        of_ops = [op for row in page.ops for op in row.of if op is not None and op.stack]
        self.stacks = {stack: number for number, stack in enumerate(dict.fromkeys(op.stack for op in of_ops))}
        self.json = {
            "timed": page.timed,
            "modules": self._modules(),
            "ops": list(self._ops),
            "words": list(self._words),
            "patterns": self._patterns,
            "stacks": [[lines[line] for line in stack] for stack in self.stacks],
            "lines": list(lines),
        }

    def _modules(self) -> list[list[Any]]:
        found = []
        around: list[str] = []  # the names of the enclosing modules, by depth
        for row in self._page.modules:
            del around[row.depth :]
            outer = f"{around[-1]}." if around and around[-1] else ""
            around.append(row.name)
            name, kind = self._words[row.name[len(outer) :]], self._words[row.kind]
            ops = [self._ops[self._op(op)] for op in row.ops]
            of = [self._module(row, run, module) for run, module in enumerate(row.of)]
            found.append([row.depth, name, kind, int(row.changed), int(row.is_open), ops, of])
        return found

    def _module(self, row: ModuleRow, run: int, module: Module | None) -> Any:
        if module is None:
            return _NOTHING
        total = module.total
        time = self._words[written.duration(total.time)] if self._page.timed else _NOTHING
        casts, bytes_cast = self._casts(total)
        shares = round(100 * row.casts[run], 1), round(100 * row.bytes[run], 1)
        rule = self._words[module.rule]
        return [self._dtypes(total.compute_dtypes), time, casts, shares[0], bytes_cast, shares[1], rule]

    def _op(self, row: OpRow) -> tuple[Any, ...]:
        known = next(op for op in reversed(row.of) if op is not None)
        of = tuple(self._counts(op) for op in row.of)
        texts = row.op.removeprefix("aten::"), row.phase, known.policy or "no policy", written.ruled(known)
        return (*(self._words[text] for text in texts), of)

    def _counts(self, op: Op | None) -> Any:
        if op is None:
            return _NOTHING
        dtypes = tuple(self._dtypes(op.compute_dtypes))
        return (self._words[f"{op.calls:,}"], dtypes, *self._casts(op))

    def _casts(self, counts: Counts) -> tuple[int, int]:
        return self._words[f"{counts.casts:,}"], self._words[
            written.size(counts.cast_bytes) if counts.cast_bytes else "0"
        ]

    def _dtypes(self, counts: Mapping[str, int]) -> list[int]:
        found = []
        for dtype, count in written.in_order(counts):
            number = self._words[dtype]
            self._patterns[number] = written.pattern(dtype)
            found += [number, count]
        return found


def _numbers() -> dict[Any, int]:
    """Return a mapping that gives each new key the next number."""
    return defaultdict(itertools.count().__next__)


_NAMES = ("before", "after")
_MAX_MODULES = 200
"""The number of modules shown without script."""
_MAX_PLACES = 50
_MAX_ROWS = 100


def render(page: Page) -> str:
    """Return the HTML of a report."""
    data = PageData(page)
    scripts = ("page.js", "page_modules.js", "page_ops.js")
    return _render("page.html", ["page.css"], scripts, data.json, page=page, stacks=data.stacks)


def render_run(page: RunPage) -> str:
    """Return the HTML of the page of a training run."""
    return _render(
        "page_run.html", ["page.css", "page_run.css"], ["page_run.js"], page.data, page=page, version=__version__
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
def _environment() -> Any:
    """Return an environment that escapes names of modules, ops and files, which the program chooses."""
    jinja2 = library("jinja2")
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters.update(
        size=written.size,
        count="{:,}".format,
        percent="{:.0%}".format,
        share=written.percent,
        magnitude="{:.3g}".format,
        duration=written.duration,
        pattern=written.pattern,
        in_order=written.in_order,
        each=lambda of, name: [None if record is None else getattr(record, name) for record in of],
        alike=lambda values: all(value == values[0] for value in values),
        ruled=written.ruled,
        flops=written.flops_text,
        fast_shares=written.fast_shares,
        outside_text=written.outside_text,
        matmul_lines=written.matmul_lines,
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
