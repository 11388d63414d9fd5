"""Policies and what is compiled for later: ahead of time, and in the cache on disk."""

import contextlib

import pytest
import torch

import polycast

pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
MM_UP = {"mm": "fp32"}
X = torch.ones(2, 2)


def square(x):
    return torch.mm(x, x)


@pytest.mark.slow
def test_code_that_was_compiled_ahead_of_time_without_policies_is_refused_with_some():
    function = torch.compile(square, backend="inductor", fullgraph=True)
    if not hasattr(function, "aot_compile"):
        pytest.skip(f"torch {torch.__version__} compiles no function ahead of time")
    compiled = function.aot_compile(((X,), {}))
    assert compiled(X).dtype is torch.float32
    with (
        polycast.autocast("cpu", enabled=False, policy=MM_UP),
        pytest.raises(RuntimeError, match="policies of polycast"),
    ):
        compiled(X)
    assert compiled(X).dtype is torch.float32


def test_the_key_of_the_cache_on_disk_has_the_policies_and_autocasts_state():
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

    graph = torch.fx.symbolic_trace(square)

    def ours_in_key(policies, dtype=None):
        details = object.__new__(AOTAutogradCacheDetails)
        with polycast.autocast("cpu", dtype=dtype, policy=policies), contextlib.suppress(TypeError):
            details.__init__(graph)  # polycast adds to the key, then calls torch's, which lacks its arguments here
        return vars(details)

    tanh_down = {"tanh": "lower_precision_fp"}
    found = [
        ours_in_key(None),
        *(ours_in_key(*given) for given in [(MM_UP,), (dict(MM_UP),), (tanh_down,), (MM_UP, torch.bfloat16)]),
    ]
    assert found[0] == {}
    assert [found.index(key) for key in found] == [0, 1, 1, 3, 1]
    assert ours_in_key(MM_UP, torch.float16) not in found
    with polycast.register_op("aten::sort", "fp32"):
        assert ours_in_key(None) not in found
    assert ours_in_key(None) == {}
