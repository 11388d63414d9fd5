"""A backend with caches_casts = False: each use of a weight casts it again, in all kinds of regions and caches."""

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")


def cast_used(weight):
    """Return the cast of a weight that an op saved for its backward."""
    x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    return torch.mm(x, weight).grad_fn._saved_mat2


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("region", [polycast.autocast, torch.autocast])
def test_two_uses_of_a_weight_share_a_cast_only_if_casts_are_cached(other_cpu, caches, region):
    other_cpu(caches_casts=caches)
    polycast.install("cpu")
    weight = torch.nn.Parameter(torch.ones(64, 64))
    with region("cpu"):
        first, second = cast_used(weight), cast_used(weight)
    if (
        region is polycast.autocast or polycast.plugin.choose_engine().name == "native"
    ):  # the other has no torch's cache
        assert (first.data_ptr() == second.data_ptr()) is caches


@pytest.mark.parametrize("caches", [True, False])
def test_a_weight_cache_has_casts_only_if_casts_are_cached(other_cpu, caches):
    other_cpu(caches_casts=caches)
    weight, cache = torch.nn.Parameter(torch.ones(64, 64)), polycast.WeightCache()
    for _ in range(2):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            torch.mm(torch.ones(2, 64), weight)
    assert cache.stats().entries == int(caches)


@pytest.mark.parametrize("caches", [True, False])
def test_compiled_code_has_an_operator_for_casts_only_if_casts_are_cached(other_cpu, caches):
    other_cpu(caches_casts=caches)
    weight, cache, graphs = torch.nn.Parameter(torch.ones(64, 64)), polycast.WeightCache(), []

    def compiler(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    compiled = torch.compile(lambda x: x @ weight, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        assert compiled(torch.ones(2, 64)).dtype is torch.bfloat16
    assert ("cached_cast" in graphs[0]) is caches
