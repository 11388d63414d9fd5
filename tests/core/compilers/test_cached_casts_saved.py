"""Cached casts in exported programs, and in the caches on disk that processes share."""

import json
import uuid

import pytest
import torch
from torch import nn

import polycast

pytestmark = pytest.mark.slow

RUN = """
import json, sys
import torch
from torch._dynamo.utils import counters
torch.compiler.config.cache_key_tag = sys.argv.pop()
torch.manual_seed(0)
model, x = torch.nn.Linear(64, 64), torch.linspace(-1, 1, 128).reshape(2, 64)
if sys.argv[1] == "torch":
    region = lambda: torch.autocast("cpu")
else:
    import polycast
    caches = [polycast.WeightCache(verify=True) for _ in range(int(sys.argv[2]))]
    settings = {"cache": caches[-1]} if caches else {}
    region = lambda: polycast.autocast("cpu", **settings)
def inside(x):
    with region():
        return model(x)
function = torch.compile(inside if sys.argv[1] == "inside" else model, fullgraph=True)
with torch.no_grad():
    for _ in range(2):
        if sys.argv[1] == "inside":
            y = function(x)
        else:
            with region():
                y = function(x)
found = counters["aot_autograd"]
hits = [found["autograd_cache_hit"], found["autograd_cache_miss"]]
kept = sum(cache.stats().hits for cache in caches) if "polycast" in sys.modules else 0
print(json.dumps([hits, kept, y.float().sum().item(), "polycast" in sys.modules]))
"""
HIT, MISS = [1, 0], [0, 1]


@pytest.fixture(name="run", scope="module")
def _run(run_with_inductor):
    """Return a function that runs a model in a process, which finds in the caches only what this file saved."""
    tag = str(uuid.uuid4())

    def run(*args):
        return json.loads(run_with_inductor(RUN, *args, tag).splitlines()[-1])

    return run


def test_code_with_cached_casts_is_found_again_and_shared_with_no_code_without_them(run):
    hits, hits_of_casts, total, _ = run("torch", "0")
    assert (hits, hits_of_casts) == (MISS, 0)
    assert run("around", "1") == [MISS, 1, total, True]
    assert run("around", "3") == [HIT, 1, total, True]  # the number of the cache is not part of the code
    assert run("around", "0")[1:] == [0, total, True]


def test_regions_in_the_code_find_their_caches(run):
    total = run("inside", "1")[2]
    assert run("inside", "3")[1:] == [1, total, True]


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # engines trace alike
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_program_that_is_compiled_ahead_of_time_needs_no_polycast(engine, tmp_path):
    model, x, cache = nn.Linear(64, 64), torch.randn(2, 64), polycast.WeightCache()
    path = tmp_path / "model.pt2"
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        program = torch.export.export(model, (x,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        expected = model(x)
    assert b"cached_cast" not in path.read_bytes()
    torch.testing.assert_close(torch._inductor.aoti_load_package(str(path))(x), expected)
