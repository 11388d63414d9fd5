"""``Reference``, what ``compare`` compares with, and ``Comparison``, its result."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from polycast import Policy
from polycast.plugin import Recipe, Result, dtype_name
from polycast_plugins.observe import LowBit, recipe_lines

from .values import Error

PolicyLike: TypeAlias = Policy | Mapping[Any, Any] | str | os.PathLike[str]
"""The types that ``policy=`` accepts."""
SCHEMA = 1
"""The schema of :meth:`Comparison.to_dict`."""
_SHOWN = 40


@dataclass(frozen=True)
class Reference:
    """A run to compare with, which differs in what is given from the run that is compared.

    Attributes:
        model: another model, such as another checkpoint; its modules are matched by their names.
        dtype: another fast dtype.
        policy: another policy; ``{}`` for none.
        recipe: another recipe; ``"none"`` for none.
        enabled: whether it runs in a region; False for float32, outside all regions.
        compiled: whether code of :func:`torch.compile` runs as such, or eagerly.

    Example:
        >>> import torch, polycast
        >>> model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
        >>> float16 = polycast.Reference(dtype=torch.float16)
        >>> comparison = polycast.compare(model, x, dtype=torch.bfloat16, reference=float16)
        >>> comparison.reference
        'a region of float16 on cpu'
    """

    model: torch.nn.Module | None = None
    dtype: torch.dtype | None = None
    policy: PolicyLike | None = None
    recipe: Recipe | str | None = None
    enabled: bool | None = None
    compiled: bool | None = None

    @classmethod
    def of(cls, value: object) -> "Reference":
        """Return a reference: float32 for None, and a module as the model.

        Raises:
            TypeError: it is something else.
        """
        if value is None:
            return cls(enabled=False, compiled=False)
        if isinstance(value, torch.nn.Module):
            return cls(value)
        if isinstance(value, Mapping):
            raise TypeError(
                f"reference must be a polycast.Reference or a model, got a mapping ({type(value).__name__}). Load a "
                "state dict into a copy of the model: other = copy.deepcopy(model); other.load_state_dict(...)"
            )
        if not isinstance(value, cls):
            raise TypeError(
                f"reference must be a polycast.Reference, a model, or None for float32; got {value!r}. For example: "
                "reference=polycast.Reference(dtype=torch.float16)"
            )
        if value.model is not None and not isinstance(value.model, torch.nn.Module):
            raise TypeError(f"the model of a Reference must be a torch.nn.Module, got {type(value.model).__name__}")
        return value

    def over(self, other: "Reference") -> "Reference":
        """Return this reference with what is not given as in another."""
        given: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **given)


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
