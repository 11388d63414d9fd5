"""Weights that stay cached are in huge pages: prepacked ones, and casts in a WeightCache."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import polycast

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no transparent huge pages"
)
HUGE_PAGE = 2**21
LAYOUTS = {"rows are dense": lambda weight: weight, "columns are dense": lambda weight: weight.t()}


def advised():
    """Return how many bytes of this process are to be in huge pages."""
    size = total = 0
    for line in SMAPS.read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and " hg" in line:
            total += size
    return total


@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_casts_in_a_cache_are_in_huge_pages_until_they_are_dropped(engine, layout):
    x, weight = torch.randn(3, 2048), torch.nn.Parameter(LAYOUTS[layout](torch.randn(2048, 2048)), requires_grad=False)
    cache = polycast.WeightCache()
    before = advised()
    for _ in range(2):
        with polycast.autocast("cpu", cache=cache):
            result = F.linear(x, weight)
    assert torch.equal(result, F.linear(x.bfloat16(), weight.bfloat16()))
    assert advised() - before == weight.numel() * 2
    cache.clear()
    assert advised() == before


@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize("rows", [64, 2048])
def test_other_casts_are_where_torch_puts_them(engine, rows):
    weight = torch.nn.Parameter(torch.randn(rows, 2048), requires_grad=False)
    cache = polycast.WeightCache() if rows == 64 else None
    before = advised()
    with polycast.autocast("cpu", cache=cache):
        F.linear(torch.randn(3, 2048), weight)
        assert advised() == before
