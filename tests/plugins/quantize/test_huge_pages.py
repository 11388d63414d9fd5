"""Large prepacked weights are in huge pages."""

import pytest
import torch
from tests.core.engine.test_huge_pages import HUGE_PAGE, advised, pytestmark  # noqa: F401

import polycast


def test_large_prepacked_weights_are_in_huge_pages():
    answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
    if not answer:
        pytest.skip(f"no int8 here: {answer.reason}")
    kernels = polycast.plugin.recipe_kernels(polycast.plugin.get_backend("cpu"), polycast.Int8())
    kernel = kernels["aten::linear"][0].kernel
    before = advised()
    packed = kernel.prepack(torch.randn(2048, 1500))
    assert packed[0].nbytes > HUGE_PAGE
    assert advised() - before == packed[0].nbytes // HUGE_PAGE * HUGE_PAGE
    del packed
    assert advised() == before
