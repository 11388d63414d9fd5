"""`Observation`: the counts of a run, as a value to read, print, save and compare."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from polycast.plugin import Result

from . import text as text_table
from .conversions import Writer, check_writer, from_json, scalars_of, to_json, write_scalars
from .facts import LISTS, SHARES, Facts, Matmul, Run, combined
from .finding import Finding
from .findings import findings_of
from .records import Cast, Compiled, Counts, LowBit, Module, NonFinite, NumericsRecord, Op, Region

SCHEMA = 1
"""The schema that is written, and the newest that can be read."""

_LONGEST_TEXT = 8000

_Path: TypeAlias = str | os.PathLike[str]


class Observation(Result):
    """The counts of :func:`polycast.observe`, during the block and afterwards.

    ``print()`` and notebooks show a table. ``a + b`` adds the counts of two runs; ``a - b`` subtracts them, and may
    have negative counts.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(4, 4)
        >>> with polycast.autocast("cpu"), polycast.observe(model) as seen:
        ...     output = model(torch.ones(2, 4))
        >>> (op,) = [op for op in seen.ops if op.op == "aten::linear"]
        >>> op.calls, op.policy, op.rule, op.output_dtypes
        (1, 'lower_precision_fp', "backend's table", {'bfloat16': 1})
    """

    def __init__(self, facts: "Facts | Callable[[], Facts]", step: Callable[[], None] | None = None) -> None:
        self._facts = facts
        """The facts or, inside the block, a function that returns them."""
        self._step = step

    def step(self) -> None:
        """Note that a step of the program has ended, such as a training step, and the next one begins.

        With ``schedule=``, each step is observed or not. Call it on the thread that entered the block.

        Raises:
            RuntimeError: the block has ended, or this is another thread.
        """
        if self._step is None:
            raise RuntimeError("this observation has ended: call step() inside the block of polycast.observe")
        self._step()

    def _end(self, facts: "Facts | Callable[[], Facts]") -> None:
        self._facts, self._step = facts, None

    @property
    def facts(self) -> Facts:
        """All data."""
        return self._facts() if callable(self._facts) else self._facts

    @property
    def run(self) -> Run:
        """The conditions and the duration."""
        return self.facts.run

    @property
    def ops(self) -> tuple[Op, ...]:
        """The counts by op and pass, the op with most time first or, without ``timing=True``, with most calls."""
        return self.facts.ops

    @property
    def modules(self) -> tuple[Module, ...]:
        """The counts by module of the model, in the order of ``model.named_modules()``; empty without a model."""
        return self.facts.modules

    @property
    def casts(self) -> tuple[Cast, ...]:
        """The casts, by op and module, the largest first."""
        return self.facts.casts

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that were entered, by line of the program."""
        return self.facts.regions

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """The compiled code that ran."""
        return self.facts.compiled

    @property
    def low_bit(self) -> tuple[LowBit, ...]:
        """The calls that recipes computed, and those that they declined, with the reasons."""
        return self.facts.low_bit

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """The matmuls, by op, module and outcome for the recipe, the largest first."""
        return self.facts.matmuls

    @property
    def recipe_share(self) -> float | None:
        """The share of the floating-point operations in matmuls that recipes computed; None without a recipe.

        All :attr:`matmuls` count: in regions and outside, forward and backward, attention too.
        """
        return self.facts.recipe_share

    @property
    def numerics(self) -> tuple[NumericsRecord, ...]:
        """The magnitudes, underflow and overflow of what was computed and cast; empty without ``numerics=True``."""
        return self.facts.numerics

    @property
    def nonfinite(self) -> NonFinite | None:
        """The first op that turned finite inputs into inf or nan; None without one, or if ``nonfinite="ignore"``."""
        return self.facts.nonfinite

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Costs in time or accuracy, with remedies."""
        return findings_of(self.facts)

    @property
    def headline(self) -> str:
        """The share of the time, else of the matmuls, in a fast dtype, the casts, and the kinds of findings."""
        return text_table.headline(self.facts, self.findings)

    @property
    def total(self) -> Counts:
        """The counts of all ops."""
        return self.facts.total

    @property
    def fast_share(self) -> float | None:
        """The share of calls with floating-point tensors that computed in a fast dtype; None without such calls."""
        return self.facts.fast_share

    @property
    def fast_time_share(self) -> float | None:
        """The share of the time in ops that calls in a fast dtype took; None without ``timing=True``."""
        return self.facts.fast_time_share

    @property
    def fast_flops_share(self) -> float | None:
        """The share of the floating-point operations in matmuls that a fast dtype computed; None without matmuls."""
        return self.facts.fast_flops_share

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values.

        The keys are ``schema`` (an int), ``run`` (a ``Run``), ``total`` (the ``Counts`` of all ops), ``fast_share``,
        ``fast_time_share``, ``fast_flops_share``, ``recipe_share``; the lists ``ops``, ``modules``, ``casts``,
        ``regions``, ``compiled``, ``chains``, ``flows``, ``low_bit``, ``matmuls``, ``numerics`` and ``findings``; and
        ``nonfinite``, a record or None. A record is a mapping of its fields.
        """
        facts = self.facts
        values = to_json(facts)
        return {
            "schema": SCHEMA,
            "run": values["run"],
            "total": values["total"],
            **{name: getattr(facts, name) for name in SHARES},
            **{name: values[name] for name in LISTS},
            "findings": [to_json(finding) for finding in findings_of(facts)],
            "nonfinite": values["nonfinite"],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Observation":
        """Return the observation with the values of :meth:`to_dict`.

        Raises:
            ValueError: these are not the values of an observation, or have a newer schema.
        """
        schema = values.get("schema") if isinstance(values, dict) else None
        if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
            raise ValueError(f'an observation has "schema": {SCHEMA}, got {schema!r}')
        if schema > SCHEMA:
            raise ValueError(
                f"it has schema {schema}, and this polycast reads schemas up to {SCHEMA}: install a newer polycast"
            )
        try:
            facts = from_json(Facts, {name: values[name] for name in (*LISTS, "nonfinite", "run")})
            findings_of(facts)  # raises if chains have too few ops
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"it is not an observation: {type(error).__name__}: {error}") from error
        return cls(facts)

    def save(self, path: _Path) -> None:
        """Write the observation to a file, as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def to_html(self, path: _Path, *, before: "Observation | None" = None) -> None:
        """Write a report to a file: one HTML page that loads nothing else.

        Args:
            path: the file.
            before: an observation to compare with, shown side by side.

        Raises:
            OSError: the file cannot be written.
            TypeError: `before` is not an observation.
        """
        if before is not None and not isinstance(before, Observation):
            raise TypeError(f"before must be an Observation or None, got {type(before).__name__}")
        from . import report  # imported here for Jinja2, which only reports need

        text = report.render(report.page_of(self.facts, None if before is None else before.facts))
        # Names of files and modules may contain surrogates, which UTF-8 cannot encode.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")

    def log_to(self, writer: Writer, step: int) -> None:
        """Write shares, counts, underflow and overflow as scalars of a step, with tags such as ``"polycast/casts"``.

        Args:
            writer: ``torch.utils.tensorboard.SummaryWriter`` or anything with its ``add_scalar``, such as
                ``polycast_plugins.integrations.wandb.WandbWriter``; or the path of a file, to which a JSON line is
                appended.
            step: the number of the step.

        Raises:
            OSError: the file cannot be written.
            TypeError: `writer` is not a writer or a path, or `step` is not an int.
        """
        check_writer(writer)
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step must be an int, got {step!r}")
        write_scalars(writer, scalars_of(self.facts), step)

    @classmethod
    def load(cls, path: _Path) -> "Observation":
        """Return the observation that :meth:`save` wrote to a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it does not contain an observation, or one of a newer schema.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:  # from json, from decoding, and from from_dict
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def __add__(self, other: object) -> "Observation":
        """Return the sum of two observations."""
        return self._combined(other, 1)

    def __sub__(self, other: object) -> "Observation":
        """Return the difference of two observations."""
        return self._combined(other, -1)

    def _combined(self, other: object, sign: int) -> "Observation":
        if not isinstance(other, Observation):
            return NotImplemented  # type: ignore[no-any-return]
        return Observation(combined(self.facts, other.facts, sign))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observation) and self.facts == other.facts

    __hash__ = object.__hash__

    def __reduce__(self) -> "tuple[type[Observation], tuple[Facts]]":
        """Copy and pickle the counts so far: the recorder stays in this process."""
        return Observation, (self.facts,)

    def heading(self) -> str:
        """Return lines on the run."""
        return text_table.run_text(self.facts)

    def tables(self) -> "list[tuple[list[str], list[list[str]]]]":
        """Return the table of ops."""
        return [text_table.op_table(self.facts)]

    def lines(self) -> list[str]:
        """Return what is below the table; the findings are last."""
        return text_table.lines_of(self.facts, self.findings)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = sys.maxsize) -> str:
        """Return what ``print`` shows, in lines of at most `width` characters: of the table, the columns that fit."""
        facts, findings = self.facts, self.findings
        table, lines = text_table.op_table(facts, width), text_table.lines_of(facts, findings, width)
        text = self.as_text(text_table.run_text(facts, width), [table], lines)
        if len(text) <= _LONGEST_TEXT:
            return text
        return f"{text[:_LONGEST_TEXT].rpartition(chr(10))[0]}\n... and more: see seen.ops and seen.findings"

    def __repr__(self) -> str:
        facts = self.facts
        return f"<Observation of {facts.total.calls} calls of {len(facts.ops)} ops>"
