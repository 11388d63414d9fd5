"""Checks of what is used with regions: cached weight casts, custom autograd functions, and torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polycast import WeightCache, custom_bwd, custom_fwd
from polycast.plugin import choose_engine

from .subject import Device, Subject, require

_NOT_SHARED = "two uses of one weight in {} must share one cast; each made its own. Is is_capturing() true?"


class FeatureChecks(Subject):
    """Cached casts, functions with custom_fwd and custom_bwd, and compiled functions.

    The compilers generate no code: the checks are of what is traced.
    """

    def test_weight_is_cast_once_in_a_region(self, device: Device) -> None:
        """A weight is cast once in a region, whether it requires grad or not; at each use if casts are not cached."""
        for frozen in (False, True):
            weight = _weight(device)
            weight.requires_grad_(not frozen)
            with device.region():
                first, second = _cast_used(device, weight), _cast_used(device, weight)
            kind = "frozen" if frozen else "trained"
            shares = first.data_ptr() == second.data_ptr()
            if device.backend.caches_casts:
                require(shares or not choose_engine().caches, _NOT_SHARED.format(f"a region on {device.type} ({kind})"))
            else:
                require(
                    not shares, f"two uses of one weight on {device.type} share a cast, though caches_casts is False"
                )

    def test_weight_updated_in_a_region(self, device: Device) -> None:
        """The next use of a weight in a region sees an in-place update."""
        weight = _weight(device)
        ones = device.put(torch.ones(2, 2))
        with torch.no_grad(), device.region():
            torch.mm(ones, weight)
            weight.fill_(3.0)
            after = torch.mm(ones, weight)
        seen = device.values(after).tolist()
        require(
            seen == [[6.0, 6.0], [6.0, 6.0]],
            f"after weight.fill_(3.0) in a region on {device.type}, ones @ weight must be 6.0; it is {seen}. Do the "
            "device's in-place kernels bump the version of the tensor?",
        )

    def test_weight_cache_across_regions(self, device: Device) -> None:
        """A WeightCache serves a region with the cast of the region before."""
        weight = _weight(device)
        cache = WeightCache()
        ones = device.put(torch.ones(2, 2))
        results = []
        for _ in range(2):
            with torch.no_grad(), device.region(cache=cache):
                results.append(device.values(torch.mm(ones, weight)))
        stats = cache.stats()
        expected = (1, 1, 1) if device.backend.caches_casts and choose_engine().caches else (0, 0, 0)
        require(
            (stats.misses, stats.hits, stats.entries) == expected and torch.equal(*results),
            f"two regions on {device.type} that share a WeightCache must make one cast of a weight and use it twice; "
            f"none if caches_casts is False, or on the reference engine. Its stats are {stats}",
        )

    def test_custom_function_has_the_state_of_its_region(self, device: Device) -> None:
        """Forward and backward of a decorated function run in the autocast state of the call."""
        device.skip_if_fake("autograd cannot run a backward on an absent device")
        seen: list[dict[str, object]] = []

        class Double(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type=device.type)
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                seen.append(device.state())
                return x + x

            @staticmethod
            @custom_bwd(device_type=device.type)
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                seen.append(device.state())
                return gradient + gradient

        before = device.state()
        x = device(2).requires_grad_()
        with device.region():
            y = Double.apply(x)  # type: ignore[no-untyped-call]
        y.sum().backward()
        device.must_be(before, "after the backward of a decorated function")
        wanted = {"enabled": True, "dtype": device.backend.default_dtype}
        for part, state in zip(("forward", "backward"), seen, strict=True):
            device.must_be(wanted, f"in the {part} of a decorated function", state)

    def test_custom_function_with_cast_inputs(self, device: Device) -> None:
        """With cast_inputs the inputs are cast, and forward runs with autocast disabled."""
        seen: list[tuple[object, torch.dtype]] = []

        class Double(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type=device.type, cast_inputs=torch.float32)
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                seen.append((device.state()["enabled"], x.dtype))
                return x + x

        with device.region():
            Double.apply(device(2).to(device.backend.default_dtype))  # type: ignore[no-untyped-call]
        require(
            seen == [(False, torch.float32)],
            f"forward of a function with cast_inputs=torch.float32, in a region on {device.type}, must run with "
            f"autocast disabled on float32 inputs; (enabled, dtype) was {seen}",
        )

    # The warning is about Python, not about the backend.
    @pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_region_inside_a_compiled_function(self, device: Device, compiler: str) -> None:
        """A region in a compiled function does what it does in eager mode."""

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with device.region():
                return torch.mm(x, y)

        _must_compile(device, function, compiler)

    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_region_around_a_compiled_function(self, device: Device, compiler: str) -> None:
        """A compiled function that is called in a region does what it does in eager mode."""

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, y)

        with device.region():
            _must_compile(device, function, compiler)


def _weight(device: Device) -> torch.nn.Parameter:
    device.skip_if_fake("casts of fake tensors are not cached")
    weight = torch.nn.Parameter(device.put(torch.ones(2, 2)))
    if type(weight) is not torch.nn.Parameter:
        pytest.skip(f"tensors of {device.type} are of the subclass {type(weight).__name__}, whose casts are not cached")
    return weight


def _cast_used(device: Device, weight: torch.Tensor) -> torch.Tensor:
    """Return the cast of a weight that an op saved for its backward."""
    x = device.put(torch.ones(2, 2)).to(device.backend.default_dtype).requires_grad_()
    node = torch.mm(x, weight).grad_fn
    cast: torch.Tensor = node._saved_mat2  # type: ignore[union-attr]
    return cast


def _must_compile(
    device: Device, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], compiler: str
) -> None:
    device.skip_if_fake("torch.compile runs its graphs on real tensors")
    before = device.state()
    x, y = device(4, 4), device(4, 4)
    plain = function(x, y)
    torch.compiler.reset()
    try:
        compiled = torch.compile(function, backend=compiler)(x, y)
    finally:
        torch.compiler.reset()
    device.must_be(before, f"after a function compiled with {compiler}")
    require(
        compiled.dtype is plain.dtype,
        f"compiled with {compiler}, mm on {device.type} gave {compiled.dtype}; in eager mode it gives {plain.dtype}",
    )
    torch.testing.assert_close(device.values(compiled), device.values(plain))
