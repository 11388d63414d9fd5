"""Checks of cached weight casts."""

import pytest
import torch

from polycast import WeightCache

from .subject import Device, Subject, require

_NOT_SHARED = "two uses of one weight in {} must share one cast; each made its own. Is is_capturing() true?"


class CastChecks(Subject):
    """Cached weight casts."""

    def test_weight_is_cast_once_in_a_region(self, device: Device) -> None:
        """A weight is cast once in a region, whether it requires grad or not."""
        for frozen in (False, True):
            weight = _weight(device)
            weight.requires_grad_(not frozen)
            with device.region():
                first, second = _cast_used(device, weight), _cast_used(device, weight)
            kind = "frozen" if frozen else "trained"
            require(first.data_ptr() == second.data_ptr(), _NOT_SHARED.format(f"a region on {device.type} ({kind})"))

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
        require(
            (stats.misses, stats.hits, stats.entries) == (1, 1, 1) and torch.equal(*results),
            f"two regions on {device.type} that share a WeightCache must make one cast of a weight and use it twice; "
            f"its stats are {stats}",
        )


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
