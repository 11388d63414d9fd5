"""``equalize``: find factors for the input channels of a model's weights, in one pass over data."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from polycast import Equalization
from polycast.common.plain_text import first_of
from polycast.engine.casts.weights import parameter_of
from polycast.engine.recipes.equalized import activations_of, matrix_of, product_arguments
from polycast.plugin import LowBitKernel, Recipe, events, read_recipe
from polycast.policy.equalization import EqualizedWeight, fingerprint_of
from polycast.policy.weight_views import TRANSPOSED, WHOLE, parameters_by_name, view_of
from polycast_plugins.observe import RandomState

from .calls import ModelCall, run_eagerly, tensors_of
from .compare import enabled_region
from .isolation import find_writes, isolated

_SEED = 0
_STRENGTHS = (0.35, 0.5, 0.65, 0.8)
_WORTH = 0.95
"""Factors cost time at each call: they have to lower the error to this part of it."""
_SMALLEST = 2.0**-20
"""The smallest magnitudes of a weight's channels that count, relative to the largest: others hardly matter."""
_ROWS = 64
"""The rows in a sample. With fewer terms than output features, they take a small part of the weight's memory."""


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
    products = _Products(model)

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
    return Equalization(tuple(products.equalized()))


def _calls(model: torch.nn.Module, batches: object) -> Iterator[ModelCall]:
    if isinstance(batches, (torch.Tensor, tuple, str, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, such as a list or a DataLoader, got {type(batches).__name__}. "
            "Put a single batch into a list, [batch]; a tuple of batches has to be a list too, list(batches)."
        )
    return (ModelCall.of(model, tuple(batch) if isinstance(batch, list) else batch) for batch in batches)


def _without_equalization(recipe: Recipe | str) -> Recipe:
    """Return a recipe with the same settings, and no equalization.

    Raises:
        TypeError, ValueError: it is not a recipe, or takes no equalization.
    """
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


class _Products:
    """The products by weights of a model.

    Attributes:
        found: the products by each weight, by its name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.found: dict[str, tuple[str, str, torch.Tensor, EqualizedProduct]] = {}
        self._names: dict[int, str] = {}
        self._by_values: dict[str, EqualizedProduct] = {}
        for name, parameter in parameters_by_name(model).items():
            self._names.setdefault(id(parameter), name)
        self._generator = torch.Generator().manual_seed(_SEED)

    def add(self, kernel: LowBitKernel, op: str, args: Sequence[Any]) -> None:
        """Add a call of an op, given its kernel."""
        weight = args[kernel.weight]
        parameter, matrix = parameter_of(weight), matrix_of(op, weight)
        if not kernel.equalizes or matrix is None or parameter is None or id(parameter) not in self._names:
            return
        name, view = self._names[id(parameter)], view_of(matrix, parameter)
        if view is None:
            return
        key = name if view in (WHOLE, TRANSPOSED) else f"{name}[{view}]"
        if key in self.found and self.found[key][1] != view:  # the matrix and the transposed one
            key = f"{name}[{view or 'whole'}]"
        if key not in self.found:
            values = fingerprint_of(matrix)  # by which kernels find factors: equal weights have the same
            product = self._by_values.get(values) or EqualizedProduct(
                kernel, op, weight.detach(), matrix.detach(), self._generator
            )
            self._by_values[values] = product
            self.found[key] = name, view, parameter, product
        self.found[key][3].activations.add(activations_of(op, args))

    def equalized(self) -> Iterator[EqualizedWeight]:
        """Yield the weights with the factors that were chosen.

        Raises:
            ValueError: all activations of a weight have inf or nan.
        """
        broken = [key for key, (*_, product) in self.found.items() if product.activations.are_all_left_out]
        if broken:
            raise ValueError(
                f"{first_of(map(repr, broken))} got inf or nan in each row of the activations: check the batches. "
                "polycast.observe() names the op that makes the first of them."
            )
        for key, (name, view, parameter, product) in self.found.items():
            with isolated(RandomState(product.matrix.device.type, [product.matrix])):
                chosen = product.choose() if len(product.activations.rows) else None
            if chosen is not None:
                yield EqualizedWeight(
                    name=key,
                    shape=(product.matrix.shape[0], product.matrix.shape[1]),
                    strength=chosen.strength,
                    error=chosen.error,
                    plain_error=chosen.plain_error,
                    parameter=name,
                    size=tuple(parameter.shape),
                    view=view,
                    fingerprint=fingerprint_of(product.matrix),
                    factors=chosen.factors,
                )


class Factors(NamedTuple):
    """The factors of a weight, and what they achieve; see `EqualizedWeight`."""

    strength: float
    error: float
    plain_error: float
    factors: torch.Tensor | None


class EqualizedProduct:
    """The products by one weight.

    Attributes:
        matrix: the weight, [N, K].
        activations: what it was multiplied by.
    """

    def __init__(
        self,
        kernel: LowBitKernel,
        op: str,
        weight: torch.Tensor,
        matrix: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        self._kernel, self._op, self._weight = kernel, op, weight
        self.matrix = matrix
        self.activations = Activations(matrix.shape[1], matrix.device, generator)

    def choose(self) -> Factors | None:
        """Return the factors with which the error is the least; None if the kernel cannot prepack the weight.

        There must be rows of activations.
        """
        rows = self.activations.rows
        expected = rows @ self.matrix.float().t()
        plain_error = self._error(rows, expected, None)
        if plain_error is None:
            return None
        best = Factors(0.0, plain_error, plain_error, None)
        for strength in _STRENGTHS:
            factors = self._factors(strength)
            error = self._error(rows, expected, factors)
            if error is not None and error < (best.error if best.strength else _WORTH * plain_error):
                best = Factors(strength, error, plain_error, factors)
        return best

    def _factors(self, strength: float) -> torch.Tensor:
        """Return factors, at least 1, so that no activation overflows by division."""
        of_weight = torch.linalg.vector_norm(self.matrix, torch.inf, dim=0).float().cpu()
        of_weight = of_weight.clamp(min=max(of_weight.max().item() * _SMALLEST, torch.finfo(torch.float32).tiny))
        amax = self.activations.amax.cpu()
        seen = amax[amax > 0]
        # A channel that was always zero here may not be so later.
        typical = seen.median().item() if len(seen) else 1.0
        amax = torch.where(amax > 0, amax, typical)
        logs = strength * amax.log() - (1 - strength) * of_weight.log()
        factors: torch.Tensor = (logs - logs.min()).exp()
        return factors

    def _error(self, rows: torch.Tensor, expected: torch.Tensor, factors: torch.Tensor | None) -> float | None:
        """Return the relative error, the root of its mean square over rows; None if the weight cannot be prepacked."""
        prepacked = self._kernel.prepack(self._weight, *(() if factors is None else (factors,)))
        if not prepacked:
            return None
        result = self._kernel.run(tuple(prepacked), *product_arguments(self._op, rows, self._weight))
        squares = (result.float() - expected).square().sum(1) / expected.square().sum(1).clamp(min=1e-30)
        return squares.mean().sqrt().item()


class Activations:
    """The activations of one weight, in memory that does not grow with their number.

    Attributes:
        amax: float32 [K], the largest magnitude of each input channel.
        rows: [up to 64, K], a sample in which each row is equally likely.
        left_out: whether rows were left out, because of inf or nan.
    """

    def __init__(self, terms: int, device: torch.device, generator: torch.Generator) -> None:
        self.amax = torch.zeros(terms, device=device)
        self.rows = torch.empty(0, terms, device=device)
        self.left_out = False
        self._keys = torch.empty(0)
        self._generator = generator

    @property
    def are_all_left_out(self) -> bool:
        """Whether there were rows, all with inf or nan."""
        return self.left_out and not len(self.rows)

    def add(self, x: torch.Tensor) -> None:
        """Add activations [..., K]. Rows with inf or nan are left out."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return
        amax = _amax(rows)
        if not bool(amax.isfinite().all()):
            self.left_out = True
            rows = rows[rows.isfinite().all(1)]
            if not len(rows):
                return
            amax = _amax(rows)
        torch.maximum(self.amax, amax, out=self.amax)
        keys, places = torch.rand(len(rows), generator=self._generator).topk(min(_ROWS, len(rows)))
        keys = torch.cat((self._keys, keys))
        self._keys, chosen = keys.topk(min(_ROWS, len(keys)))
        sample = rows[places.to(rows.device)].float()
        self.rows = torch.cat((self.rows, sample))[chosen.to(rows.device)]


def _amax(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each column, without a copy of the rows."""
    amax: torch.Tensor = torch.linalg.vector_norm(rows, torch.inf, dim=0)
    return amax.float()
