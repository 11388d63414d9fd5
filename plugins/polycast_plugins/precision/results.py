"""The results of ``compare``, and of ``explain`` for a model: values that print as tables and convert to plain data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from polycast.plugin import Recipe, Result, dtype_name
from polycast_plugins.observe import LowBit, recipe_lines

from .values import Error

SCHEMA = 1
"""The schema of the plain data of a :class:`Comparison` and a :class:`ModelExplanation`."""
_SHOWN = 40


@dataclass(frozen=True)
class ModuleErrors(Result):
    """The errors of a module, over all its calls.

    Attributes:
        name: its name in the model; empty for the model itself.
        kind: its class.
        calls: the number of its calls in the reference's run.
        adds: the relative error that it adds: its own error, or the growth from its inputs to its output, unless the
            modules in it account for the growth.
        own: the error that the module itself makes: in the tested run's way, given the reference's inputs, with the
            modules in it as in the reference; infinite if the module of another model raises on these inputs.
        inherited: the relative error that comes from its inputs, or from the modules in it; None if unknown.
        total: the error of its output in the tested run; None if the two runs called it differently.
        makes_nonfinite: whether it, and no module in it, returned inf or nan where the reference does not, given finite
            inputs.
    """

    name: str
    kind: str
    calls: int
    adds: float
    own: Error
    inherited: float | None
    total: Error | None
    makes_nonfinite: bool


@dataclass(frozen=True)
class GradientErrors(Result):
    """The errors of the gradients of a module's inputs, over all its calls, or of a parameter.

    The gradient of an input is what the backward of the module adds to it, without that of other users of the input.

    Attributes:
        module: the name of the module; ``"(loss)"`` for the loss.
        parameter: the name of the parameter in the module; empty for the inputs.
        adds: the relative error that is added here: its own error, or for inputs the growth from the gradients of the
            module's outputs to these, unless the modules in it account for the growth. For a gradient that is rounding
            errors only, as of a bias before a batch norm: relative to the largest gradient of the module.
        own: the error that the backward of the module itself makes: of its ops in the region, given the reference's
            inputs and the reference's gradients of its outputs, with the modules in it as in the reference. None if it
            could not be repeated: its inputs cannot be copied or were written to later, it has hooks before its
            backward, or the forward itself computes gradients of it.
        inherited: the relative error that comes from elsewhere: from the gradients of its outputs, or from the modules
            in it; None if unknown.
        total: the error in the backward of the tested run; None if the two runs called the module differently.
        makes_nonfinite: whether it, and no module in it, returned inf or nan where the reference does not, given finite
            gradients; False for a parameter.
    """

    module: str
    parameter: str
    adds: float
    own: Error | None
    inherited: float | None
    total: Error | None
    makes_nonfinite: bool

    @property
    def name(self) -> str:
        """The name of the parameter, or of the module."""
        return ".".join(filter(None, (self.module, self.parameter))) if self.parameter else self.module


@dataclass(frozen=True)
class Comparison(Result):
    """A model against a reference. ``print`` shows the modules that add most to the error.

    Attributes:
        device_type, dtype: the device and the dtype of the region.
        modules: the modules that were called, beginning with the largest addition to the error.
        outputs: the error of each floating-point tensor that the model returns, by its path.
        first_nonfinite: the first module that returned inf or nan where the reference does not, given finite inputs.
        parted: modules in which the two runs made different calls, for example because of a condition on computed
            values. The modules that they call have no total error.
        recipe: the recipe of the region, if it has one.
        low_bit: the ops that recipes, of the region or of rules, computed or declined there, with the reasons.
        reference, tested: the two runs, as text.
        gradients: with a loss, the errors of the gradients of inputs and parameters, beginning with the largest
            addition.
        first_nonfinite_gradient: the first module, in backward, that made inf or nan of finite gradients.
        is_complete: False if the comparison was interrupted, and has what was found until then.
    """

    device_type: str
    dtype: torch.dtype
    modules: tuple[ModuleErrors, ...]
    outputs: Mapping[str, Error]
    first_nonfinite: str | None
    parted: tuple[str, ...]
    recipe: Recipe | None = None
    low_bit: tuple[LowBit, ...] = ()
    reference: str = "float32"
    tested: str = ""
    gradients: tuple[GradientErrors, ...] = ()
    first_nonfinite_gradient: str | None = None
    is_complete: bool = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "outputs": dict(self.outputs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, outputs=MappingProxyType(state["outputs"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data for JSON: inf and nan are texts."""
        return {"schema": SCHEMA, "torch": torch.__version__, **super().to_dict()}

    def tables(self) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
        """Yield the tables of modules, of gradients, and of outputs."""
        yield _MODULES, [*self._module_rows()]
        if self.gradients:
            yield _GRADIENTS, [*self._gradient_rows()]
        yield _OUTPUTS, [[name, *_measures(error)] for name, error in self.outputs.items()]

    def _shown(self) -> list[ModuleErrors]:
        return [module for module in self.modules if module.own.relative or module.inherited][:_SHOWN]

    def _module_rows(self) -> Iterator[list[str]]:
        for each in self._shown():
            numbers = map(_number, (each.adds, each.own.relative, each.inherited))
            yield [each.name or "(model)", each.kind, str(each.calls), *numbers, *_measures(each.total)]

    def _gradient_rows(self) -> Iterator[list[str]]:
        for each in self._shown_gradients():
            numbers = map(_number, (each.adds, None if each.own is None else each.own.relative, each.inherited))
            yield [each.module or "(model)", each.parameter or "inputs", *numbers, *_measures(each.total)]

    def _shown_gradients(self) -> list[GradientErrors]:
        return [each for each in self.gradients if each.adds or each.inherited or each.own is None][:_SHOWN]

    def lines(self) -> list[str]:
        """Return what was compared, and what is not in the tables."""
        sentences = [f"{self.reference} against {self.tested}: relative errors."]
        if not self.is_complete:
            sentences.insert(0, "INTERRUPTED: what was found until then.")
        for count, what in (
            (len(self.modules) - len(self._shown()), "module"),
            (len(self.gradients) - len(self._shown_gradients()), "gradient"),
        ):
            if count:
                sentences.append(
                    f"{count} more {what} is not shown." if count == 1 else f"{count} more {what}s are not shown."
                )
        if self.first_nonfinite is not None:
            sentences.append(f"The first inf or nan: {self.first_nonfinite or '(model)'}.")
        if self.first_nonfinite_gradient is not None:
            sentences.append(f"The first inf or nan in backward: {self.first_nonfinite_gradient or '(model)'}.")
        if self.parted:
            names = ", ".join(name or "(model)" for name in self.parted)
            sentences.append(f"The two runs made different calls in {names}.")
        sentences += recipe_lines(self.low_bit)
        if self.recipe is not None and not any(not each.declined for each in self.low_bit):
            sentences.append(
                f"Nothing was computed by {self.recipe!r}: these are the errors of {dtype_name(self.dtype)}."
            )
        return sentences


_MEASURES = ("total", "max", "cosine", "inf", "nan")
_MODULES = ("module", "class", "calls", "adds", "own", "inherited", *_MEASURES)
_GRADIENTS = ("gradient in", "of", "adds", "own", "inherited", *_MEASURES)
_OUTPUTS = ("output", *_MEASURES)


def _measures(error: Error | None) -> list[str]:
    if error is None:
        return ["-"] * len(_MEASURES)
    numbers = [_number(error.relative), _number(error.max), f"{error.cosine:.6f}"]
    return [*numbers, str(error.inf), str(error.nan)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}" if value else "0"


@dataclass(frozen=True)
class ModuleExplanation(Result):
    """The dtypes of a module that runs ops itself, or has a rule.

    Attributes:
        name: its name in the model; empty for the model itself.
        kind: its class.
        calls: the number of its calls.
        rule: the rule of :func:`polycast.apply_policy` that applies to it: its own, or that of the innermost module
            around it; empty if there is none.
        weights: the dtypes of its own floating-point parameters.
        compute: by what its ops compute in, the number of ops: a dtype, such as ``"bfloat16"``, or a recipe, such as
            ``"int8"``. Casts, views, and ops on integers do not count.
        output: the dtypes of the floating-point tensors that it returns.
        declined: why the recipe does not compute ops of this module, by op.
        matched: by op, the number of calls whose inputs ``CastPolicy.MATCH`` casts.
    """

    name: str
    kind: str
    calls: int
    rule: str
    weights: tuple[torch.dtype, ...]
    compute: Mapping[str, int]
    output: tuple[torch.dtype, ...]
    declined: Mapping[str, str]
    matched: Mapping[str, int]


@dataclass(frozen=True)
class ModelExplanation(Result):
    """The effect of autocast on the modules of a model. ``print`` and notebooks show a table.

    Attributes:
        device_type, dtype: the device and the dtype of the region.
        recipe: the recipe of the region, if it has one.
        modules: the modules that run ops themselves or have a rule, in the order of their first calls.
    """

    device_type: str
    dtype: torch.dtype
    recipe: Recipe | None
    modules: tuple[ModuleExplanation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data for JSON."""
        return {"schema": SCHEMA, "torch": torch.__version__, **super().to_dict()}

    def tables(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Yield the table of modules."""
        has_rules = any(each.rule for each in self.modules)
        columns = ("module", "class", "weights", "computes in", "returns", *(["rule"] if has_rules else []))
        yield columns, [row[: len(columns)] for row in self._rows()]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for each in self.modules:
            compute = ", ".join(each.compute) or "-"
            yield each.name or "(model)", each.kind, _names(each.weights), compute, _names(each.output), each.rule

    def lines(self) -> list[str]:
        """Return the region, what its recipe declines, and the ops that have MATCH in effect."""
        recipe = "" if self.recipe is None else f" and {self.recipe.short}"
        names: dict[tuple[str, str], list[str]] = {}
        for each in self.modules:
            notes = [("Declined", f"{op.removeprefix('aten::')}: {reason}") for op, reason in each.declined.items()]
            notes += [("Cast by MATCH", f"inputs of {op.removeprefix('aten::')}") for op in each.matched]
            for note in notes:
                names.setdefault(note, []).append(each.name or "(model)")
        lines = [f"{verb} in {_some(modules)}: {what}" for (verb, what), modules in names.items()]
        return [f"In a region of {dtype_name(self.dtype)}{recipe} on {self.device_type}.", *lines]


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(dtype_name, dtypes)) or "-"


def _some(names: list[str]) -> str:
    others = f" and {len(names) - 3} other modules" if len(names) > 4 else ""
    return ", ".join(names[:3] if others else names) + others
