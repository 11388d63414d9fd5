"""``calibrate``: find what makes a model's quantized weights more accurate, by running the model over data."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from polycast import Calibration
from polycast.plugin import Recipe, events, read_recipe
from polycast_plugins.observe import RandomState
from polycast_plugins.quantize import CalibratedWeight, Products

from .calls import ModelCall, run_eagerly, tensors_of
from .compare import enabled_region
from .isolation import find_writes, isolated


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    recipe: Recipe | str,
    path: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Run a model over data, and return what makes the products of its weights more accurate under a recipe.

    - *Factors* even out the input channels. A recipe with a scale for each row of the activations loses accuracy where
      a few channels are much larger than the others, as in many large models. Factors move these outliers into the
      weight (as SmoothQuant does, arXiv 2211.10438). Each weight gets the factors with the least error of its products
      on the data, computed by the kernel that will be used; or none, if no factors lower the error by much.
    - *Levels* compensate rounding errors, for ``Int4`` and other recipes whose kernels take them: the columns of the
      weight are rounded one by one, and the later ones make up for the errors of the earlier, as the activations go
      together (GPTQ, arXiv 2210.17323). They take as much memory as the prepacked weight.

    The model runs in eval mode, under ``no_grad``, in a region in which the products of the recipe are in float32. It
    is restored: mode, buffers, attributes, random number generators. Weights are not changed. Compiled modules run
    eagerly, and rules for modules apply. Memory: for each weight, 64 rows of activations and the largest of each
    channel; and, for levels, a float32 matrix [K, K] for each activations of K channels. If these need more than 2 GiB
    the model runs over the data several times, once for as many weights as fit. Progress is logged by the logger
    ``polycast.calibrate`` at the level INFO.

    A few dozen typical inputs suffice for factors, and some hundred thousand rows of activations (tokens) for levels.
    They have to reach each part of the model: a weight that is not multiplied is not calibrated.

    Args:
        model: a module, on the device that it will run on.
        batches: an iterable of batches, such as a list or a DataLoader, which is read once; for levels, batches are
            kept. A batch is a tensor, a tuple or list of arguments, or a dict of keyword arguments for the model's
            forward.
        recipe: the recipe that will be used, such as ``"int8"`` or ``Int4()``.
        path: a file to save the calibration to, after each pass over the data. If it exists, a run with the same recipe
            that was interrupted goes on: the weights that the file has are not calibrated again.

    Returns:
        A calibration, for ``Int8(calibration=...)`` or ``Int4(calibration=...)``. ``print`` shows the error of each
        weight's products.

    Raises:
        OSError: the file cannot be read or written.
        TypeError: `model`, `batches` or a batch is of another type.
        ValueError: there are no batches; the recipe takes no calibration; the model has no parameters, or no
            products that the recipe computes; all activations of a weight have inf or nan; or the file has other
            weights, or is the calibration for another recipe.
        RuntimeError: the recipe cannot be used on the model's device; or the model's forward writes to its parameters.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, 256))
        >>> batches = [torch.randn(16, 256) for _ in range(4)]
        >>> calibration = polycast.calibrate(model, batches, "int8")  # doctest: +SKIP
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8(calibration=calibration)):
        ...     y = model(torch.randn(1, 256))  # doctest: +SKIP
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    calls, plain = _calls(model, batches), _without_calibration(recipe)
    device_type = next((parameter.device.type for parameter in model.parameters()), None)
    if device_type is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to calibrate")
    region = enabled_region(device_type, None, recipe=plain)
    products = Products(model)
    known = _calibrated_before(path, plain.format)
    kept: list[ModelCall] = []

    def run(calls: Iterable[ModelCall]) -> None:
        def run_calls() -> None:
            for call in calls:
                with region:
                    call.run(model)

        with ExitStack() as stack:
            stack.enter_context(isolated(RandomState(device_type, tensors_of(model, ()))))
            stack.enter_context(run_eagerly())
            stack.enter_context(_in_eval_mode(model))
            stack.callback(events.calibration.remove, products.add)
            events.calibration.add(products.add, threading.get_ident())
            find_writes(model, run_calls)

    def keeping() -> Iterator[ModelCall]:
        for call in calls:
            kept.append(call)
            yield call

    run(keeping())
    if not kept:
        raise ValueError("there are no batches: calibrate needs inputs like those that the model will get")
    if not products.found:
        raise ValueError(
            f"{plain!r} computes no product with a weight of the model on {device_type} that can be calibrated. "
            f"polycast.compare(model, inputs, recipe={plain.short!r}) shows the reasons."
        )
    if path is not None and known and not any(product.fingerprint in known for *_, product in products.found.values()):
        raise ValueError(f"{os.fspath(path)!r} is the calibration of other weights: give the path of a new file")
    found: dict[str, CalibratedWeight] = {}
    parts = products.calibrated(lambda: run(kept), known)
    while True:
        with isolated(RandomState(device_type, tensors_of(model, ()))):
            part = next(parts, None)
        found |= {each.name: each for each in part or ()}
        weights = tuple(found[name] for name in products.found if name in found)
        calibration = Calibration(weights, recipe=plain.format)
        if path is not None:
            calibration.save(path)
        if part is None:
            return calibration


def _calibrated_before(path: str | os.PathLike[str] | None, recipe: str) -> dict[str, CalibratedWeight]:
    """Return the weights in a file, by fingerprint; none if it does not exist.

    Raises:
        OSError, ValueError: as `Calibration.load`; or the file was made for another recipe.
    """
    if path is None or not os.path.exists(path):
        return {}
    before = Calibration.load(path)
    if before.recipe != recipe:
        other = before.recipe or "an unknown recipe"
        raise ValueError(
            f"{os.fspath(path)!r} is the calibration for {other}, not for {recipe}: give the path of a new file"
        )
    return {each.fingerprint: each for each in before.weights}


def _calls(model: torch.nn.Module, batches: object) -> Iterator[ModelCall]:
    if isinstance(batches, (torch.Tensor, tuple, str, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, such as a list or a DataLoader, got {type(batches).__name__}. "
            "Put a single batch into a list, [batch]; a tuple of batches has to be a list too, list(batches)."
        )
    return (ModelCall.of(model, tuple(batch) if isinstance(batch, list) else batch) for batch in batches)


def _without_calibration(recipe: Recipe | str) -> Recipe:
    """Return a recipe with the same settings, and no calibration."""
    wanted = read_recipe(recipe)
    if not hasattr(wanted, "calibration"):
        raise ValueError(f"{wanted!r} takes no calibration: use a recipe that does, such as polycast.Int8()")
    return wanted if wanted.calibration is None else wanted.with_options(calibration=None)


@contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
