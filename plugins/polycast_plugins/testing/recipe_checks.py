"""Checks of low-bit kernels, against float64 within the error of their recipe."""

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from polycast import CastPolicy, WeightCache, autocast
from polycast.plugin import Backend, LowBitKernel, Recipe, check, choose_engine, events, find_op, recipe_kernels

from .contract import answer_of
from .low_bit import LINEAR_OPS, LinearOp, assert_within, for_any_size, recipes, run_prepacked
from .subject import Device, Subject, require

_SIZES = [(5, 64, 48), (1, 128, 32), (16, 32, 16), (3, 33, 17)]
"""(m, k, n), some of them odd."""


def arguments_of(op: str, m: int, k: int, n: int) -> list[list[Any]]:
    """Return CPU arguments of an op, several sets, for an m x k by k x n product; the weight has no zeros."""
    x, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    weight = weight.sign() * (weight.abs() + 0.1)
    if op == "aten::linear":
        return [[x, weight, bias], [torch.randn(3, m, k).transpose(0, 1), weight, None], [x[0], weight, bias]]
    if op == "aten::mm":
        return [[x, weight.t().contiguous()], [x.t().contiguous().t(), weight.t()]]
    if op == "aten::matmul":
        return [[x, weight.t()], [torch.randn(2, m, k), weight.t().contiguous()]]
    if op == "aten::addmm":
        return [[bias, x, weight.t(), 1, 1], [torch.randn(m, n), x, weight.t().contiguous(), 2, -0.5]]
    filters = torch.randn(n, k, 3, 3)
    filters = filters.sign() * (filters.abs() + 0.1)
    return [[torch.randn(m, k, 5, 4), filters, bias, [1, 1], [1, 1], [1, 1], 1]]


class RecipeChecks(Subject):
    """Kernels for the recipes that the device supports, of whatever kind."""

    def test_availability_of_recipes(self) -> None:
        """The backend says of each known kind of recipe whether the device supports it and, if not, why."""
        backend = self.get_backend()
        for wanted in recipes().values():
            call = f"{self.backend}: recipe_availability({wanted!r})"
            answer = answer_of(call, lambda wanted=wanted: backend.recipe_availability(wanted))  # type: ignore[misc]
            require(answer or answer.reason.strip(), f"{call} says no and gives no reason. Give one.")

    def test_recipe(self, recipe: str | None) -> None:
        """The backend has kernels for a recipe, of ops that autocast casts to the fast dtype."""
        backend = self.get_backend()
        wanted = _supported(backend, recipe)
        call = f"{self.backend}: low_bit_kernels({wanted!r})"
        kernels = recipe_kernels(backend, wanted)
        require(
            kernels and all(isinstance(kernel, LowBitKernel) for _, kernel in _pairs(kernels)),
            f"{call} must map names of ops to instances of polycast.plugin.LowBitKernel, at least one; got {kernels!r}",
        )
        for name, kernel in _pairs(kernels):
            require(
                backend.policies.get(name) is CastPolicy.LOWER_PRECISION_FP,
                f"{call} has a kernel for {name}, which is not LOWER_PRECISION_FP in the backend's table, so it never "
                "runs. Give the op that policy, or remove the kernel.",
            )
            op = find_op(name)
            weight = None if op is None else op._schema.arguments[kernel.weight : kernel.weight + 1]
            require(
                weight is None or (weight and str(weight[0].type) == "Tensor"),
                f"{call}: the kernel for {name} says that its weight is argument {kernel.weight}, which is not a "
                "tensor. Set the attribute `weight` to its position.",
            )

    def test_recipe_product(self, device: Device, recipe: str | None) -> None:
        """A kernel returns the op's float64 result in the fast dtype, within the error of the recipe."""
        device.skip_if_fake("there are no values")
        for call in kernel_calls(device, recipe):
            for fast_dtype in device.fast_dtypes():
                for dtype in (torch.float32, fast_dtype):
                    given = call.of_dtype(dtype)
                    expected, error = call.product.within(call.recipe, given)
                    result = call.run(device, given, fast_dtype)
                    with call.context(f"with inputs of {dtype}"):
                        assert_within(device.values(result), expected, error)

    def test_recipe_unsupported_reason(self, device: Device, recipe: str | None) -> None:
        """A kernel gives a reason against sizes that do not fit, and answers for fake tensors as for real ones."""
        for call in kernel_calls(device, recipe, unsupported_too=True):
            args = tree_map_only(torch.Tensor, device.put, call.args)
            misfit = list(args)
            x = args[call.product.activations]
            misfit[call.product.activations] = torch.cat([x, x], 1 if call.product.op == "aten::conv2d" else -1)
            require(
                call.unsupported_reason(misfit),
                f"{call} must decline activations that do not fit the weight, so that torch raises its own error",
            )
            if device.fake:
                call.unsupported_reason(args)
                continue
            for each in (args, misfit):
                with FakeTensorMode() as mode:
                    of_fakes = call.unsupported_reason(tree_map_only(torch.Tensor, mode.from_tensor, each))
                require(
                    of_fakes == call.unsupported_reason(each),
                    f"{call} answers {call.unsupported_reason(each)!r}, and {of_fakes!r} for the same as fake tensors. "
                    "It may use dtypes, sizes and strides, but no values.",
                )

    def test_recipe_in_compiled_code(self, device: Device, recipe: str | None) -> None:
        """The operator in compiled code has the shape, strides and dtype of the kernel's result."""
        device.skip_if_fake("the kernel has to run")
        for call in kernel_calls(device, recipe):
            args = call.on(device)
            with torch.no_grad(), _region(device, call.recipe, None):
                graph = make_fx(lambda *args, call=call: call.product(args), tracing_mode="fake")(*args)
            promised = list(graph.graph.nodes)[-2].meta["val"]  # the last is the output
            with torch.no_grad(), _outcomes() as outcomes:
                result = graph(*args)
            require(outcomes == [None], f"{call} did not run in compiled code: {outcomes[0] if outcomes else ''}")
            expected, found = _layout(promised), _layout(result)
            require(expected == found, f"{call} returned {found}, and compiled code expects {expected}, as of the op.")

    def test_recipe_inf_and_nan(self, device: Device, recipe: str | None) -> None:
        """inf and nan in activations propagate as in the op, and the other outputs are right."""
        device.skip_if_fake("there are no values")
        dtype = device.backend.default_dtype
        for call in kernel_calls(device, recipe):
            for value in (torch.inf, -torch.inf, torch.nan):
                args = list(call.args)
                x = args[call.product.activations] = args[call.product.activations].clone().contiguous()
                x.select(0, x.shape[0] // 2).view(-1)[0] = value
                clean = list(args)
                clean[call.product.activations] = x.nan_to_num(0.0, 0.0, 0.0)
                error = call.product.within(call.recipe, clean)[1]
                expected = call.product.within(call.recipe, args)[0]
                result = device.values(call.run(device, args, dtype))
                finite = expected.isfinite()
                with call.context(f"with a {value} among its activations"):
                    assert not (result.isfinite() & ~finite).any(), "a finite number where the op returns inf or nan"
                    assert result[expected.isnan()].isnan().all(), "a nan was lost"
                    assert_within(result[finite], expected[finite], error.expand_as(expected)[finite])

    def test_recipe_empty_batch(self, device: Device, recipe: str | None) -> None:
        """An empty batch gives an empty result."""
        device.skip_if_fake("the kernel has to run")
        for call in kernel_calls(device, recipe):
            args = list(call.args)
            if args[call.product.activations].dim() < 2:
                continue
            args[call.product.activations] = args[call.product.activations][:0]
            if call.product.op == "aten::addmm":
                args[0] = args[0][:0] if args[0].dim() == 2 else args[0]
            if call.unsupported_reason(call.on(device, args)):
                continue
            shape = call.product(args).shape
            found = call.run(device, args, device.backend.default_dtype).shape
            require(found == shape, f"{call}, with no rows, returned the shape {tuple(found)}, expected {tuple(shape)}")

    def test_recipe_packing(self, device: Device, recipe: str | None) -> None:
        """A kernel reads the prepacked weight only, which has memory of its own."""
        device.skip_if_fake("there are no values")
        dtype = device.backend.default_dtype
        for call in kernel_calls(device, recipe):
            args = call.on(device)
            weight = args[call.product.weight].detach()
            with torch.no_grad():
                prepared = call.prepack(weight)
                shared = [each for each in prepared if _shares_memory(each, weight)]
                require(not shared, f"{call}: prepack() returned memory of the weight, which changes with it")
                before = [device.values(arg).clone() for arg in args if isinstance(arg, torch.Tensor)]
                first = device.values(run_prepacked(call.kernel, prepared, *args, dtype=dtype))
                after = [device.values(arg) for arg in args if isinstance(arg, torch.Tensor)]
                require(all(map(torch.equal, before, after)), f"{call}: run() wrote to its arguments")
                weight.fill_(torch.nan)
                second = device.values(run_prepacked(call.kernel, prepared, *args, dtype=dtype))
            require(
                torch.equal(first, second), f"{call}: run() read the weight, or returned another result the second time"
            )

    def test_recipe_in_a_region(self, device: Device, recipe: str | None) -> None:
        """A region prepacks a weight once, and again after it has changed."""
        device.skip_if_fake("fake tensors are not prepacked")
        for call in kernel_calls(device, recipe):
            args, cache = call.on(device), WeightCache()
            weight = args[call.product.weight]
            if type(weight) is not torch.nn.Parameter:
                pytest.skip(
                    f"parameters of {device.type} are of the subclass {type(weight).__name__}, which is not cached"
                )
            for change in (None, None, -1.0):
                with torch.no_grad(), _outcomes() as outcomes:
                    if change is not None:
                        weight.mul_(change)
                    with _region(device, call.recipe, cache):
                        result = call.product(args)
                require(outcomes == [None], f"{call} did not run in a region with {call.recipe!r}: {outcomes}")
            stats = cache.stats()
            require(
                (stats.misses, stats.hits, stats.packings) == ((2, 1, 1) if choose_engine().caches else (0, 0, 0)),
                f"{call}, in three regions with one WeightCache, the weight changed before the third, must pack it "
                f"twice and find it once; the stats are {stats}",
            )
            with torch.no_grad(), _region(device, call.recipe, cache):  # run(), and then the native engine's call
                results = [device.values(call.product(args)) for _ in range(2)]
            require(torch.equal(*results), f"{call}: `operator` returns another result than run()")
            changed = list(call.args)
            changed[call.product.weight] = -changed[call.product.weight]
            with call.context("after the weight was negated"):
                assert_within(device.values(result), *call.product.within(call.recipe, changed))


class KernelCall:
    """A kernel, and CPU arguments of its op in float32."""

    def __init__(self, device_type: str, kernel: LowBitKernel, product: LinearOp, recipe: Recipe, args: Any) -> None:
        self.kernel, self.product, self.recipe, self.args = kernel, product, recipe, args
        shapes = ", ".join(str(list(arg.shape)) for arg in args if isinstance(arg, torch.Tensor))
        self._text = f"{product.op} by {recipe.short} on {device_type}, of shapes {shapes}"

    def __str__(self) -> str:
        return self._text

    def of_dtype(self, dtype: torch.dtype) -> list[Any]:
        """Return the arguments cast to a dtype."""
        given: list[Any] = tree_map_only(torch.Tensor, lambda arg: arg.to(dtype), self.args)
        return given

    def on(self, device: Device, args: Sequence[Any] | None = None) -> list[Any]:
        """Return the arguments, or others, on the device, the weight as a parameter."""
        args = self.args if args is None else args
        given: list[Any] = tree_map_only(torch.Tensor, lambda arg: device.put(arg.clone()), args)
        given[self.product.weight] = torch.nn.Parameter(given[self.product.weight], requires_grad=False)
        return given

    def unsupported_reason(self, args: Sequence[Any]) -> str | None:
        """Return why the kernel does not support a call; None if it does."""
        reason = self.kernel.unsupported_reason(*args)
        require(
            reason is None or (isinstance(reason, str) and reason.strip()),
            f"{self}: unsupported_reason() must return None or a reason, got {reason!r}",
        )
        return reason

    def prepack(self, weight: torch.Tensor, *factors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return the prepacked weight, given calibration factors if the kernel takes them."""
        prepared = self.kernel.prepack(weight, *factors)
        if not isinstance(prepared, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in prepared):
            raise AssertionError(  # require() would need the text, which is slow for tensors
                f"{self}: prepack() must return a tuple of tensors for a finite weight, got {prepared!r}"
            )
        return tuple(prepared)

    def run(self, device: Device, args: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """Run the kernel in a region of a fast dtype."""
        given = self.on(device, args)
        with torch.no_grad():
            prepared = self.prepack(given[self.product.weight].detach())
        with self.context(f"where the fast dtype is {dtype}"):
            return run_prepacked(self.kernel, prepared, *given, dtype=dtype)

    @contextmanager
    def context(self, how: str) -> Iterator[None]:
        """Prefix a failure with the call and `how`."""
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{self}, {how}: {error}") from None


def _supported(backend: Backend, name: str | None) -> Recipe:
    """Return the recipe with a name; skip the check if the device does not support it."""
    if name is None:
        pytest.skip(f"{backend.device_type} supports no recipe")
    recipe = recipes()[name]
    answer = check(backend, recipe)
    if not answer:
        pytest.skip(f"{backend.device_type} has no {name}: {answer.reason}")
    return recipe


def _pairs(kernels: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, LowBitKernel]]:
    """Yield each kernel with its op: those of the backend, and of extensions."""
    return ((op, each.kernel) for op, of_op in kernels.items() for each in of_op)


def kernel_calls(device: Device, name: str | None, unsupported_too: bool = False) -> Iterator[KernelCall]:
    """Yield calls of each kernel of a recipe; skip the check if there are none."""
    backend = device.backend
    recipe = _supported(backend, name)
    torch.default_generator.manual_seed(0)
    taken: list[str] = []
    kernels = recipe_kernels(backend, recipe)
    for op, kernel in _pairs(kernels):
        product = LINEAR_OPS.get(op)
        if product is None:
            continue
        with_op = for_any_size(recipe, ops=(op,))
        if op not in with_op.overloads:  # its ops are no setting
            continue
        for sizes in _SIZES:
            for args in arguments_of(op, *sizes):
                call = KernelCall(device.type, kernel, product, with_op, args)
                if unsupported_too or device.fake or call.unsupported_reason(call.on(device)) is None:
                    taken.append(op)
                    yield call
    if not taken:
        pytest.skip(f"no kernel for {name} takes the suite's arguments: {', '.join(kernels) or 'there is none'}")


def _region(device: Device, recipe: Recipe, cache: WeightCache | None) -> autocast:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a recipe is experimental
        return device.region(recipe=recipe, cache=cache)


@contextmanager
def _outcomes() -> Iterator[list[str | None]]:
    """Yield a list that gets, for each op under a recipe in this thread, why the recipe declined it; None: it ran."""
    found: list[str | None] = []

    def note(device_type: str, recipe: str, op: str, reason: str | None, package: str) -> None:
        found.append(reason)

    events.recipe_call.add(note, threading.get_ident())
    try:
        yield found
    finally:
        events.recipe_call.remove(note)


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}, strides {list(tensor.stride())}, on {tensor.device.type}"


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
