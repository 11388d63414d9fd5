"""The result of ``tune``: a policy, and the evidence for it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from polycast import Policy
from polycast.plugin import Recipe, Result, choose_engine, dtype_name, get_backend

from .minimal_set import Members, Trial
from .timing import Timings

SCHEMA = 1
"""The schema of :meth:`Evidence.to_dict`."""


@dataclass(frozen=True)
class Holdout:
    """What was measured on batches that the search has not seen.

    Attributes:
        inputs: the tensors of the batches.
        distance: the distance of the output under the policy from float32's.
        plain: the distance without a policy, as in :class:`Evidence`.
        distances: the distance under the policy for each batch.
        met: whether `distance` is within the tolerance.
        error: the exception of the model under the policy; empty if it ran.
    """

    inputs: str
    distance: float
    plain: float
    distances: tuple[float, ...]
    met: bool
    error: str = ""

    def line(self) -> str:
        """Return the measurement as a line of text."""
        verdict = "within" if self.met else "NOT within"
        what = f"held out, inputs {self.inputs}: {self.distance:.3g}, {verdict} the tolerance"
        return f"{what}; without a policy {self.plain:.3g}" + (f"; {self.error}" if self.error else "")


@dataclass(frozen=True)
class Evidence(Result):
    """The search that found a policy.

    Attributes:
        model: the class of the model.
        device_type, dtype: the device and the dtype of the region.
        inputs: the tensors that the model received.
        over, objective, metric, tolerance, budget: the arguments of :func:`polycast.tune`.
        members: the names of the modules, or ops, that are in float32 under the policy.
        candidates: the number of modules, blocks or ops to choose from.
        distance: the distance of the output under the policy from float32's.
        plain: the distance in the region without a policy, with the recipe if there is one, and with the rules of
            `exclude`.
        met: whether `distance` is within the tolerance.
        is_minimal: whether it is known that the tolerance is not met if any single member is taken out of float32, or
            any single one of `kept` is put back into the recipe. Never known with the objective ``"time"``.
        reason: why the tolerance is not met, or the policy not known to be minimal; else empty.
        trials: all evaluations, in order.
        timings: the timings, with the objective ``"time"``.
        machine: the versions, the processor, the number of threads.
        recipe: the recipe of the region, if it has one.
        kept: the names of the modules, or ops, that leave the recipe for the fast dtype under the policy.
        fast: with a recipe, the distance with everything in the fast dtype; None if it was not evaluated.
        batches: the number of batches.
        reduction: whether a distance over several batches is the worst or the mean.
        margin: the share of the tolerance that the search stayed below.
        excluded: the names of the modules, or ops, that are in float32, or keep their rule, because of `exclude`.
        holdout: what was measured on the batches of `holdout`; None without them.
    """

    model: str
    device_type: str
    dtype: torch.dtype
    inputs: str
    over: str
    objective: str
    metric: str
    tolerance: float
    budget: int
    members: Members
    candidates: int
    distance: float
    plain: float
    met: bool
    is_minimal: bool
    reason: str
    trials: tuple[Trial, ...]
    timings: Timings | None
    machine: Mapping[str, Any]
    recipe: Recipe | None = None
    kept: Members = ()
    fast: float | None = None
    batches: int = 1
    reduction: str = "worst"
    margin: float = 0.0
    excluded: Members = ()
    holdout: Holdout | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "machine": dict(self.machine)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, machine=MappingProxyType(state["machine"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the evidence as plain data for JSON: inf and nan are texts."""
        return {"schema": SCHEMA, **super().to_dict()}

    def name(self) -> str:
        """Return a name for the policy, with the inputs and the machine of the measurement."""
        on = f"{self.inputs} on {self.machine.get('device', self.machine['processor'])}"
        what = f"{self.model} in {self._numbers(' and ')} on {self.device_type}"
        return f"{what}, tuned for {self.objective} with {on}, torch {self.machine['torch']}"

    def _numbers(self, between: str) -> str:
        return dtype_name(self.dtype) + ("" if self.recipe is None else between + self.recipe.short)

    def lines(self) -> list[str]:
        """Return the evidence as lines of text."""
        fast = dtype_name(self.dtype)
        what = f"{len(self.members)} of {self.candidates} {self.over} in float32"
        what += f", {len(self.excluded)} excluded" if self.excluded else ""
        over = f" ({self.reduction} of {self.batches} batches)" if self.batches > 1 else ""
        margin = f" (margin {self.margin:g})" if self.margin else ""
        without = f"without a policy {self.plain:.3g}"
        if self.recipe is not None:
            what += f", {len(self.kept)} kept in {fast}"
            without += "" if self.fast is None else f", all in {fast} {self.fast:.3g}"
        verdict = "within" if self.met else "NOT within"
        lines = [
            f"{self.model} on {self.device_type}, {self._numbers(', ')}: {what}",
            f"{self.metric} {self.distance:.3g}{over}, {verdict} the tolerance of {self.tolerance:g}{margin}; "
            + without,
        ]
        if self.reason:
            lines.append(self.reason)
        elif self.is_minimal:
            lines.append(f"{len(self.trials)} evaluations; no single one can be taken out")
        if self.timings is not None:
            lines += self.timings.lines()
        lines.append(f"measured with inputs {self.inputs}")
        if self.holdout is not None:
            lines.append(self.holdout.line())
        lines.append("on " + ", ".join(f"{key} {value}" for key, value in self.machine.items()))
        return lines


class Tuned(NamedTuple):
    """A policy and the evidence for it; can be unpacked: ``policy, evidence = polycast.tune(...)``."""

    policy: Policy
    evidence: Evidence

    @property
    def met(self) -> bool:
        """Whether the policy keeps the tolerance."""
        return self.evidence.met

    def text(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the text of a policy file, headed by the evidence as comments; see :meth:`polycast.Policy.text`."""
        return self.policy.text(path, comments=self._comments())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a policy file for :meth:`polycast.Policy.load`, with the evidence as comments at its head.

        Raises:
            OSError: the file cannot be written.
        """
        self.policy.save(path, comments=self._comments())

    def _comments(self) -> list[str]:
        return ["Found by polycast.tune:", *self.evidence.lines()]

    def __str__(self) -> str:
        return f"{self.policy!a}\n{self.evidence}"

    def _repr_html_(self) -> str:
        return f"{self.policy._repr_html_()}\n{self.evidence._repr_html_()}"


def machine(device_type: str) -> dict[str, Any]:
    """Return what measurements depend on besides the model and its inputs."""
    device = torch.get_device_module(device_type)
    return {
        "torch": torch.__version__,
        "engine": choose_engine().name,
        **({"device": device.get_device_name()} if hasattr(device, "get_device_name") else {}),
        "processor": get_backend("cpu").device_details()["name"],
        "threads": torch.get_num_threads(),
    }
