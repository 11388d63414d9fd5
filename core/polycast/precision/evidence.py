"""What ``tune`` returns: a policy, and the evidence for it."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..common.plain_text import in_ascii
from ..engine.choice import choose
from ..policy import files
from ..policy.dtypes import dtype_name
from ..policy.files import PolicyPath
from ..policy.recipe import Recipe
from ..policy.value import Policy
from .errors import json_number
from .search import Members
from .timing import Timings
from .trials import Trial

SCHEMA = 1
"""The schema of :meth:`Evidence.to_dict`."""


@dataclass(frozen=True)
class Evidence:
    """What a policy was found by.

    Attributes:
        model: the model's class.
        device_type, dtype: the region's.
        inputs: the tensors that the model was given.
        over, objective, metric, tolerance, budget: as :func:`tune` was told.
        members: what is in float32 under the policy: names of modules, or of ops.
        candidates: how many of them were to choose from.
        distance: how far the output under the policy is from float32's.
        plain: how far that of a region without a policy is; with the recipe, where there is one.
        met: whether `distance` is within the tolerance.
        is_minimal: whether it is known that without any one of the members it is not, nor with any one of those that
            are kept in the recipe. With the objective ``"time"`` it is known of nothing.
        reason: why it is not met, or not known to be minimal; else empty.
        trials: all that was tried, in order.
        timings: what was timed, with the objective ``"time"``.
        machine: on what: versions, processor, threads.
        recipe: the region's, if it has one.
        kept: what has left the recipe for the fast dtype under the policy: names of modules, or of ops.
        fast: with a recipe: how far the output is with everything in the fast dtype; None where it was not asked.
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

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs, as JSON can have it: numbers that are not finite are texts."""
        said = {
            key: json_number(value) if isinstance(value, float) else value
            for key, value in vars(self).items()
            if key not in ("trials", "timings", "machine", "dtype", "members", "kept", "recipe")
        }
        return {
            "schema": SCHEMA,
            **said,
            "dtype": dtype_name(self.dtype),
            "members": list(self.members),
            "recipe": None if self.recipe is None else self.recipe.short,
            "kept": list(self.kept),
            "trials": [trial.to_dict() for trial in self.trials],
            "timings": None if self.timings is None else asdict(self.timings),
            "machine": dict(self.machine),
        }

    def name(self) -> str:
        """Return what the policy is called: what it was measured with and on."""
        on = f"{self.inputs} on {self.machine.get('device', self.machine['processor'])}"
        what = f"{self.model} in {self._numbers(' and ')} on {self.device_type}"
        return f"{what}, tuned for {self.objective} with {on}, torch {self.machine['torch']}"

    def _numbers(self, between: str) -> str:
        return dtype_name(self.dtype) + ("" if self.recipe is None else between + self.recipe.short)

    def __str__(self) -> str:
        return in_ascii("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """Return it for people, as lines."""
        fast = dtype_name(self.dtype)
        what = f"{len(self.members)} of {self.candidates} {self.over} in float32"
        without = f"without a policy {self.plain:.3g}"
        if self.recipe is not None:
            what += f", {len(self.kept)} kept in {fast}"
            without += "" if self.fast is None else f", all in {fast} {self.fast:.3g}"
        verdict = "within" if self.met else "NOT within"
        lines = [
            f"{self.model} on {self.device_type}, {self._numbers(', ')}: {what}",
            f"{self.metric} {self.distance:.3g}, {verdict} the tolerance of {self.tolerance:g}; {without}",
        ]
        if self.reason:
            lines.append(self.reason)
        elif self.is_minimal:
            lines.append(f"{len(self.trials)} evaluations; no single one can be taken out")
        if self.timings is not None:
            lines += self.timings.lines()
        lines.append(f"measured with inputs {self.inputs}")
        lines.append("on " + ", ".join(f"{key} {value}" for key, value in self.machine.items()))
        return lines


class Tuned(NamedTuple):
    """A policy and the evidence for it, which it can be unpacked to: ``policy, evidence = polycast.tune(...)``."""

    policy: Policy
    evidence: Evidence

    @property
    def met(self) -> bool:
        """Whether the policy keeps the tolerance."""
        return self.evidence.met

    def text(self) -> str:
        """Return the policy as a file, with the evidence as comments at its head."""
        comments = [f"# {line}\n" for line in ("Found by polycast.tune:", *self.evidence.lines())]
        return "".join(comments) + "\n" + self.policy.text()

    def save(self, path: PolicyPath) -> None:
        """Write the policy as a file, with the evidence as comments at its head; :meth:`Policy.load` reads it.

        Raises:
            OSError: it cannot be written.
        """
        files.write(path, self.text())

    def __str__(self) -> str:
        return in_ascii(f"{self.policy!r}\n{self.evidence}")


def machine(device_type: str) -> dict[str, Any]:
    """Return what measurements depend on, besides model and inputs."""
    device = torch.get_device_module(device_type)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "engine": choose().name,
        **({"device": device.get_device_name()} if hasattr(device, "get_device_name") else {}),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
