"""``tune``: find what must stay in float32, or out of a recipe, as a policy with the evidence for it."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from polycast.plugin import Recipe

from .calls import calls_of, device_of
from .compare import enabled_region, wanted_recipe
from .evidence import Tuned
from .isolation import in_use
from .measured import Loss, Metric, TuneArguments, check_loss
from .tuner import Tuner

_DEFAULT = "relative L2 error"
_DEFAULT_WITH_LOSS = "relative L2 error of output or gradients"
_CHOICES = {"over": ("modules", "ops"), "objective": ("accuracy", "time"), "reduction": ("worst", "mean")}
_MIN_BUDGET = 2
"""The region without a policy, and everything in float32; with a recipe, also everything in the fast dtype."""


def tune(
    model: torch.nn.Module,
    data: Any,
    metric: Metric | None = None,
    *,
    tolerance: float,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    over: Literal["modules", "ops"] = "modules",
    objective: Literal["accuracy", "time"] = "accuracy",
    budget: int | None = None,
    recipe: Recipe | str | None = None,
    loss: Loss | None = None,
    reduction: Literal["worst", "mean"] = "worst",
    margin: float = 0.0,
    exclude: Iterable[str] | Mapping[str, Any] = (),
    candidates: Iterable[str] | None = None,
    holdout: Any = None,
) -> Tuned:
    """Find what must stay in float32 for the output of a model in a region to stay close to float32's.

    With the objective ``"accuracy"`` this is the smallest set of modules, or of ops, that was found: :func:`compare`
    proposes an order, and group bisection decides. The result has been evaluated, as a whole and with each member taken
    out. A module counts without the modules in it: one in float32 may contain modules that are not.

    With a recipe, the result is what must leave the recipe for the fast dtype (the rule ``"none"``), and what must be
    in float32 (``"fp32"``) because the fast dtype is not sufficient either. The rules name the recipe, so that the
    policy works in regions with it and without it.

    With the objective ``"time"`` each module, or op, gets its fastest precision (float32, the fast dtype, or the recipe
    if there is one), as timed on these inputs under ``no_grad``, within the tolerance. The model under the policy is
    then timed as a whole, in alternation with float32 and with the region without a policy. If the device has a profile
    (:func:`profile`), so is the model with the modules in float32 that the profile says are faster there. The fastest
    that keeps the tolerance is returned, or in a tie the simpler one. It holds for these shapes, this machine, and
    regions without a :class:`WeightCache`. With the recipe ``"fastest"`` each matmul is computed the fastest way
    without a search; what is left to find is what must be in float32.

    With a loss, each evaluation is a forward in the region and a backward outside it. The metric receives an
    :class:`~polycast_plugins.precision.Outcome` of each run, with the output, the loss and the gradients of
    the parameters. The gradients that parameters have are restored.

    The model is restored, as by :func:`compare`. All evaluations use the same random numbers. If the model raises an
    exception under a policy, the distance is infinite, and the evidence has the text of the exception.

    Args:
        model: a module, on the device. Its results outside all regions are the reference.
        data: the inputs of one call (a tensor, a tuple of arguments, or a dict of keyword arguments for the model's
            forward), or an iterable of them, such as a DataLoader. It is read once, and the batches are kept; a batch
            that is a list counts as a tuple.
        metric: ``metric(output, reference)``, the distance of an output of the model from float32's: a number; nan and
            inf count as infinite. None: the relative L2 error over all floating-point tensors in the output; with a
            loss, the larger one of the output and of all gradients.
        tolerance: the largest permitted distance.
        device_type, dtype: of the region, as in :class:`autocast`; the device is by default the model's.
        over: what to choose from, ``"modules"`` or ``"ops"``.
        objective: ``"accuracy"`` or ``"time"``.
        budget: the maximum number of evaluations; at least 2, and 3 with a recipe. None: 16, plus four for each
            candidate.
        recipe: of the region, as in :class:`autocast`.
        loss: a function of the model's output that returns a scalar tensor; called in the region.
        reduction: the distance over several batches: the ``"worst"`` or the ``"mean"``.
        margin: the share of the tolerance to stay below it, at least 0 and below 1: with 0.2 the search aims at 80% of
            the tolerance. If no policy reaches that, it aims at the tolerance.
        exclude: globs of modules, as in a :class:`Policy`, that stay in float32, with all modules in them; or of ops.
            In a mapping, the values are what they keep in place of that: ``{"head": {"output": "float32"}}``.
        candidates: globs of modules, to choose among these only, each as one block with the modules in it that are no
            candidates of their own: ``["layers.*", "head"]``. Other modules are never in float32. Or globs of ops.
        holdout: one call's inputs, or an iterable of batches, that are only measured, under the policy that was found.

    Returns:
        The policy and its evidence. Use the policy with :func:`apply_policy`, or one for ops as ``policy=`` of regions
        (with the recipe, if there is one).

    Raises:
        TypeError: `model`, `data` or the result of `metric` or `loss` is of another type.
        ValueError: another argument is invalid; batches have different structures; `loss` has no gradients; a glob
            matches nothing; or there is no `metric`, and no floating-point tensor in the output, or no finite element
            in float32's.
        RuntimeError: as :func:`compare`.

    Warns:
        UserWarning: no policy keeps the tolerance, and the closest is returned; the policy does not keep it on
            `holdout`; or float32's own output contains inf or nan.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> _ = model[1].weight.data.fill_(1e6)  # more than float16 can hold
        >>> tuned = polycast.tune(model, torch.ones(1, 4), tolerance=0.01, dtype=torch.float16)
        >>> tuned.policy.modules["1"], tuned.met
        ('fp32', True)
    """
    wanted = wanted_recipe(recipe)
    min_budget = _MIN_BUDGET if wanted is None else _MIN_BUDGET + 1
    _check_arguments(metric, tolerance, margin, budget, min_budget)
    _check_choices(over=over, objective=objective, reduction=reduction)
    check_loss(loss)
    kept = exclude if isinstance(exclude, Mapping) else dict.fromkeys(_globs_of(exclude, "exclude"), "fp32")
    globs = None if candidates is None else _globs_of(candidates, "candidates")
    calls = calls_of(model, data)
    held_out = () if holdout is None else calls_of(model, holdout, "holdout", calls)
    region = enabled_region(device_of(model, calls) if device_type is None else device_type, dtype, recipe=wanted)
    name = _name_of(metric) if metric is not None else _DEFAULT if loss is None else _DEFAULT_WITH_LOSS
    arguments = TuneArguments(
        metric, name, region, float(tolerance), over, objective, wanted, loss, reduction, float(margin), kept, globs
    )
    with in_use(model):
        tuner = Tuner(model, calls, held_out, arguments)
        return tuner.run(max(min_budget, 4 * len(tuner.names) + 16) if budget is None else budget)


def _check_arguments(metric: object, tolerance: object, margin: object, budget: object, min_budget: int) -> None:
    """Raise TypeError or ValueError for an invalid argument."""
    if metric is not None and not callable(metric):
        raise TypeError(f"metric must be a function of an output and a reference, or None; got {metric!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance must be a number that is not negative, got {tolerance!r}")
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < 1:
        raise ValueError(f"margin must be a share of the tolerance, at least 0 and below 1; got {margin!r}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < min_budget):
        runs = "the region without a policy, and everything in float32"
        if min_budget > _MIN_BUDGET:
            runs += ", and in the fast dtype"
        raise ValueError(f"budget must be a number of evaluations, at least {min_budget} ({runs}); got {budget!r}")


def _check_choices(**values: str) -> None:
    """Raise ValueError for an argument that is not one of its choices."""
    for what, value in values.items():
        if value not in _CHOICES[what]:
            raise ValueError(f"{what} must be {' or '.join(map(repr, _CHOICES[what]))}, got {value!r}")


def _globs_of(value: object, argument: str) -> tuple[str, ...]:
    """Return globs as a tuple; one alone may be a string."""
    is_one = isinstance(value, str)
    globs = tuple(value) if isinstance(value, Iterable) and not is_one else (value,)
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{argument} must be a list of globs, such as ['layers.0', 'lm_head']; got {value!r}")
    return globs


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
