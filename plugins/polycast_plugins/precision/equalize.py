"""``equalize``: find factors for the input channels of a model's weights, in one pass over data."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from polycast import Equalization
from polycast.plugin import Recipe, events, read_recipe
from polycast_plugins.observe import RandomState
from polycast_plugins.quantize import Products

from .calls import ModelCall, run_eagerly, tensors_of
from .compare import enabled_region
from .isolation import find_writes, isolated


def equalize(model: torch.nn.Module, batches: Iterable[Any], recipe: Recipe | str) -> Equalization:
    """Run a model over data, and return factors that even out the input channels of its weights for a recipe.

    A recipe with a scale for each row of the activations loses accuracy where a few channels are much larger than the
    others, as in many large models. Factors move these outliers into the weight, which has a scale for each output
    feature (as SmoothQuant does, arXiv 2211.10438). Each weight gets the factors with the least error of its products
    on the data, computed by the kernel that will be used; or none, if no factors lower the error by much.

    The model runs in eval mode, under ``no_grad``, in a region in which the products of the recipe are in float32. It
    is restored: mode, buffers, attributes, random number generators. Weights are not changed. Compiled modules run
    eagerly, and rules for modules apply. Memory: for each weight, 64 rows of activations and the largest of each
    channel.

    A few dozen typical inputs suffice, but they have to reach each part of the model: a weight that is not multiplied
    gets no factors.

    Args:
        model: a module, on the device that it will run on.
        batches: an iterable of batches, such as a list or a DataLoader, which is read once. A batch is a tensor, a
            tuple or list of arguments, or a dict of keyword arguments for the model's forward.
        recipe: the recipe that will be used, such as ``"int8"`` or ``Int8()``.

    Returns:
        An equalization, for ``Int8(equalization=...)`` or ``Int4(equalization=...)``. ``print`` shows the error of each
        weight's products.

    Raises:
        TypeError: `model`, `batches` or a batch is of another type.
        ValueError: there are no batches; the recipe takes no equalization; the model has no parameters, or no
            products that the recipe computes; or all activations of a weight have inf or nan.
        RuntimeError: the recipe cannot be used on the model's device; or the model's forward writes to its parameters.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, 256))
        >>> batches = [torch.randn(16, 256) for _ in range(4)]
        >>> equalization = polycast.equalize(model, batches, "int8")  # doctest: +SKIP
        >>> with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8(equalization=equalization)):
        ...     y = model(torch.randn(1, 256))  # doctest: +SKIP
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    calls, plain = _calls(model, batches), _without_equalization(recipe)
    device_type = next((parameter.device.type for parameter in model.parameters()), None)
    if device_type is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to equalize")
    region = enabled_region(device_type, None, recipe=plain)
    products = Products(model)

    def run() -> int:
        count = 0
        for call in calls:
            with region:
                call.run(model)
            count += 1
        return count

    with ExitStack() as stack:
        stack.enter_context(isolated(RandomState(device_type, tensors_of(model, ()))))
        stack.enter_context(run_eagerly())
        stack.enter_context(_in_eval_mode(model))
        stack.callback(events.calibration.remove, products.add)
        events.calibration.add(products.add, threading.get_ident())
        count, _ = find_writes(model, run)
    if not count:
        raise ValueError("there are no batches: equalize needs inputs like those that the model will get")
    if not products.found:
        raise ValueError(
            f"{plain!r} computes no product with a weight of the model on {device_type} that can be equalized. "
            f"polycast.compare(model, inputs, recipe={plain.short!r}) shows the reasons."
        )
    with isolated(RandomState(device_type, tensors_of(model, ()))):
        return Equalization(tuple(products.equalized()))


def _calls(model: torch.nn.Module, batches: object) -> Iterator[ModelCall]:
    if isinstance(batches, (torch.Tensor, tuple, str, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, such as a list or a DataLoader, got {type(batches).__name__}. "
            "Put a single batch into a list, [batch]; a tuple of batches has to be a list too, list(batches)."
        )
    return (ModelCall.of(model, tuple(batch) if isinstance(batch, list) else batch) for batch in batches)


def _without_equalization(recipe: Recipe | str) -> Recipe:
    """Return a recipe with the same settings, and no equalization."""
    wanted = read_recipe(recipe)
    if not hasattr(wanted, "equalization"):
        raise ValueError(f"{wanted!r} takes no equalization: use a recipe that does, such as polycast.Int8()")
    return wanted if wanted.equalization is None else wanted.with_options(equalization=None)


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
