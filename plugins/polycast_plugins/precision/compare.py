"""``compare``: a model in a region against a reference, module by module, forward and backward.

The two runs are in lockstep, and hand each other one module's output at a time. The error of a module itself is found
by a repeated call when the reference's run leaves the module: in the region, on the reference's inputs, with the
modules in it as in the reference. The rest of its error comes from its inputs. With a loss, the two runs continue in
lockstep with their backward, where the gradients of a module's outputs take the part of inputs.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from polycast import NoRecipe, Policy, apply_policy, autocast
from polycast.errors import library, warn_user
from polycast.plugin import Recipe, check, get_backend, read_recipe
from polycast_plugins.observe import RandomState

from .calls import Calls, ModelCall, calls_of, device_of, run_eagerly, tensors_of
from .gradients import LOSS
from .isolation import in_use
from .measured import Loss, LossModule, check_loss
from .profiling_run import ModelProfile, check_not_scripted, profiled
from .record import Lockstep, Record
from .results import Comparison
from .runs import RunResult, run_both
from .sides import Side, Sides
from .values import Sums, tensors_in

PolicyLike: TypeAlias = Policy | Mapping[Any, Any] | str | os.PathLike[str]
"""The types that ``policy=`` accepts."""


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
        """Return a reference: float32 for None, and a module as the model."""
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


def compare(
    model: torch.nn.Module,
    inputs: Any,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    policy: PolicyLike | None = None,
    recipe: Recipe | str | None = None,
    reference: Reference | torch.nn.Module | None = None,
    loss: Loss | None = None,
    enabled: bool = True,
    compiled: bool = False,
) -> Comparison:
    """Compare two runs of a model, by default in a region and in float32: return each module's error and its origin.

    Both runs have the same random numbers and the model's current mode (``train`` or ``eval``). Without a loss they are
    under ``no_grad``. The model is restored: parameters, buffers, attributes, gradients, hooks. Compiled modules run
    eagerly, unless `compiled` says otherwise; in compiled code no calls of modules are visible. The run in the region
    has its own thread, with a copy of the caller's context (``contextvars``), but without the values in the caller's
    ``threading.local`` objects.
    Memory: the two runs of the model, one output of a module, and copies of arguments while a module that writes to
    them runs. With a loss: two training steps, the inputs of modules that autograd does not keep (but none in parts
    that :mod:`torch.utils.checkpoint` computes again), and the gradients of parameters once more.

    Args:
        model: a module, on the device.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments for the model's forward; or an iterable
            of such batches, over which errors are added up.
        device_type, dtype, policy, recipe: of the region, as in :class:`autocast`; the device is by default the
            model's, and the policy may have rules for modules. The comparison also counts the ops that the recipe
            computed and declined.
        reference: what to compare with: a :class:`Reference`, which has what differs from the run that is compared; a
            model, in the same region, such as another checkpoint; or None for the same model in float32, outside all
            regions.
        loss: a function of the model's output that returns a scalar tensor. It is called in the region, and the
            gradients of the loss are compared too.
        enabled: whether the model runs in a region; False to compare in float32.
        compiled: whether code of :func:`torch.compile` runs as such.

    Returns:
        A value that ``print`` shows as a table, with the modules that add most to the error first.

    Raises:
        TypeError: `model`, `inputs`, `reference` or `loss` is of another type; or `loss` returns no tensor.
        RuntimeError: the region cannot run enabled, or not with the recipe; the model's forward writes to its
            parameters; or another thread compares or tunes the model.
        ValueError: batches have different structures; or `loss` returns no scalar, or one without gradients.
        ValueError, RuntimeError: as :class:`autocast`.
        KeyboardInterrupt: with the attribute ``comparison``, which has what was found until then.

    Warns:
        UserWarning: the reference's own output contains inf or nan.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> comparison = polycast.compare(model, torch.randn(2, 4))
        >>> comparison.modules[0].name, comparison.modules[0].own.relative < 0.02
        ('0', True)
        >>> comparison = polycast.compare(model, torch.randn(2, 4), loss=lambda y: y.square().mean())
        >>> sorted(each.name for each in comparison.gradients)
        ['(loss)', '0.bias', '0.weight', '1']
    """
    calls = calls_of(model, inputs, "inputs")
    check_not_scripted(model)
    check_loss(loss)
    tested = Reference(model, dtype, policy, recipe, enabled, compiled)
    other = Reference.of(reference).over(tested)
    module = None if loss is None else LossModule(loss)
    device_type = device_of(model, calls) if device_type is None else device_type
    both = [_side(each, device_type, loss) for each in (other, tested)]
    sides = Sides(both[0], both[1], {} if module is None else {LOSS: module})
    with in_use(sides.reference.model, sides.tested.model):
        _profile(sides, calls, module)
        return _run_sides(sides, calls, module)


def _side(run: Reference, device_type: str, loss: Loss | None) -> Side:
    """Return a side of the comparison."""
    assert run.model is not None
    check_not_scripted(run.model)
    given, recipe = Policy.of(run.policy or {}), wanted_recipe(run.recipe)
    region = enabled_region(device_type, run.dtype, given.without_modules(), recipe)
    rules = Policy(modules=given.for_device(region.device).modules)
    if not run.enabled:
        region = autocast(region.device, region.fast_dtype, enabled=False)
    return Side(run.model, region, bool(run.enabled), rules, recipe, bool(run.compiled), loss)


def _profile(sides: Sides, calls: Calls, loss: LossModule | None) -> None:
    """Profile both models, and warn if the reference's output has inf or nan."""
    sums = Sums()
    for side in (sides.reference, sides.tested):
        if side is sides.tested and sides.have_one_model:
            side.profile = sides.reference.profile
            continue
        side.profile = ModelProfile()
        for call in calls:
            profile, output = _profiled(side, call, loss)
            side.profile.add(profile)
            if side is sides.reference:
                sums.add(Sums.of(output, output))
            del output
    if sums.inf or sums.nan:
        warn_user(sums.nonfinite_warning("their error is unknown", sides.reference.text()))


def _profiled(side: Side, call: ModelCall, loss: LossModule | None) -> tuple[ModelProfile, Any]:
    def run() -> Any:
        with torch.set_grad_enabled(loss is not None), side.region if side.is_enabled else nullcontext():
            output = call.run(side.model)
            if loss is not None:
                loss(output)
            return output

    random = RandomState(side.region.device, tensors_of(side.model, [call]))
    stance = nullcontext() if side.compiled else run_eagerly()
    with stance, apply_policy(side.model, side.policy):
        return profiled(side.model, run, side.names, random)


def wanted_recipe(recipe: Recipe | str | None) -> Recipe | None:
    """Return the given recipe, or None for no recipe and for ``"none"``."""
    wanted = None if recipe is None else read_recipe(recipe)
    return None if isinstance(wanted, NoRecipe) else wanted


def enabled_region(
    device_type: str, dtype: torch.dtype | None, policy: PolicyLike | None = None, recipe: Recipe | None = None
) -> autocast:
    """Return a region that runs enabled, with the recipe if one is given; raise RuntimeError if there is none."""
    backend = get_backend(device_type)
    region = autocast(device_type, dtype, enabled=False, policy=policy)
    answer = check(backend) and check(backend, region.fast_dtype)
    if not answer:
        reason = answer.reason.rstrip(".")
        raise RuntimeError(
            f"A region of {region.fast_dtype} on {region.device} runs disabled: {reason}. An enabled region is needed."
        )
    if recipe is not None:
        answer = check(backend, recipe)
        if not answer:
            raise RuntimeError(f"{recipe!r} cannot be used on {region.device}: {answer.reason}")
    return autocast(device_type, region.fast_dtype, policy=policy, recipe=recipe)


def compare_with_float32(
    model: torch.nn.Module, call: ModelCall, region: autocast, profile: ModelProfile, recipe: Recipe | None = None
) -> Comparison:
    """Compare a model in float32 with the same model in a region, given its profile."""
    outside = autocast(region.device, region.fast_dtype, enabled=False)
    sides = Sides(Side(model, outside, False, Policy()), Side(model, region, True, Policy(), recipe), {})
    sides.reference.profile = sides.tested.profile = profile
    return _run_sides(sides, (call,), None)


def _run_sides(sides: Sides, calls: Calls, loss: LossModule | None) -> Comparison:
    """Compare the two sides on all calls, given their profiles."""
    profile = sides.reference.profile
    outputs: dict[str, Sums] = {}
    with progress("comparing", profile.calls) as advance:
        record = Record(profile, advance)
        try:
            for call in calls:
                both = Lockstep(sides, call, record, loss)
                reference, tested = run_both(both)
                record.add_parameters(reference.gradients, both.own_gradients, tested.gradients, both.unknown_own)
                _add_outputs(outputs, reference, tested)
                del reference, tested, both
        except KeyboardInterrupt as interrupt:
            interrupt.comparison = _result(sides, record, outputs, is_complete=False)  # type: ignore[attr-defined]
            raise
    return _result(sides, record, outputs, is_complete=True)


def _result(sides: Sides, record: Record, outputs: Mapping[str, Sums], *, is_complete: bool) -> Comparison:
    region = sides.tested.region
    return Comparison(
        region.device,
        region.fast_dtype,
        record.modules(),
        MappingProxyType({name: sums.error() for name, sums in outputs.items()}),
        record.outputs.first_nonfinite,
        tuple(record.parted_in),
        sides.tested.recipe,
        record.recipe_counts.records(),
        sides.reference.text(),
        sides.tested.text(),
        record.gradient_errors(),
        record.gradients.first_nonfinite,
        is_complete,
    )


def _add_outputs(outputs: dict[str, Sums], reference: RunResult, tested: RunResult) -> None:
    got = dict(tensors_in(tested.output))
    for name, tensor in tensors_in(reference.output):
        if tensor.is_floating_point() or tensor.is_complex():
            outputs.setdefault(name or "output", Sums()).add(Sums.of(tensor, got.get(name)))


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a bar and yield a function that advances it by one, and can set its description."""
    state = random.getstate()
    rich, console = library("rich.progress"), library("rich.console").Console(stderr=True)
    random.setstate(state)  # importing rich draws a random number
    names = ("BarColumn", "MofNCompleteColumn", "TimeElapsedColumn")
    columns = (rich.TextColumn("{task.description}"), *(getattr(rich, name)() for name in names))
    with rich.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=total)

        def advance(now: str = what) -> None:
            shown.update(task, advance=1, description=now)

        yield advance
