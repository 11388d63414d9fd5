"""Policies and compiled code in new processes: Dynamo imported late, and caches on disk."""

import json

import pytest

import polycast

pytestmark = pytest.mark.slow

BEGIN = """
import json, os, sys, threading, warnings
import torch, polycast
warnings.filterwarnings("error", category=UserWarning, module="polycast")
from polycast import CastPolicy
POLICIES = {
    "none": None,
    "up": {"aten::mm": CastPolicy.FP32},
    "as it is": {"aten::mm": CastPolicy.PASSTHROUGH},
    "down": {"aten::mm": CastPolicy.LOWER_PRECISION_FP},
}
x = torch.ones(2, 2)
def product(x):
    return torch.mm(x, x)
def region(name, **settings):
    return polycast.autocast("cpu", policy=POLICIES[name], **settings)
"""


@pytest.fixture
def run_over_caches(run_with_inductor, tmp_path):
    """Return a function that runs a script in a process, over folders of caches of the test's own."""

    def run(script, *args):
        more = {"POLYCAST_ENGINE": "reference", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        return json.loads(run_with_inductor(BEGIN + script, *args, **more).splitlines()[-1])

    return run


@pytest.mark.parametrize("how", ["in the region", "in another thread", "after the region"])
def test_dynamo_that_is_imported_after_the_first_policies_has_the_guard(run_program, how):
    script = """
how, dtypes = sys.argv[1], []
compiled, end = threading.Event(), threading.Event()
def compile_it():
    global function
    function = torch.compile(product, backend="aot_eager", fullgraph=True)
    function(x)
    compiled.set()
def compile_it_and_stay():  # what a thread that has ended leaves is the end of torch 2.11 with CUDA and no device
    compile_it()
    end.wait()
with region("up"):
    assert "torch._dynamo" not in sys.modules
    if how == "in another thread":
        threading.Thread(target=compile_it_and_stay, daemon=True).start()
        assert compiled.wait(300)
    elif how == "in the region":
        compile_it()
if how == "after the region":
    compile_it()
for name in 2 * ("none", "up", "down"):
    with region(name, enabled=name != "none"):
        dtypes.append(str(function(x).dtype))
end.set()
print(json.dumps(dtypes))
"""
    status, printed, errors = run_program(BEGIN + script, "reference", how, imports="torch, polycast")
    assert status == 0, errors
    assert json.loads(printed) == 2 * ["torch.float32", "torch.float32", "torch.bfloat16"]


def test_the_cache_on_disk_keeps_policies_apart(run_over_caches):
    """None of them makes a cast, so that the graphs are the same, and nothing but their policies tells them apart."""
    script = """
from torch._dynamo.utils import counters
with region(sys.argv[1]):
    torch.compile(product, fullgraph=True)(x)
found = counters["aot_autograd"]
print(json.dumps([found["autograd_cache_hit"], found["autograd_cache_miss"]]))
"""
    hit, miss = [1, 0], [0, 1]
    assert [run_over_caches(script, name) for name in ("up", "up", "as it is")] == [miss, hit, miss]


def test_the_cache_on_disk_has_graphs_with_regions_and_keeps_their_settings_apart(run_over_caches):
    """Code that is loaded computes as its region says; so does its backward."""
    script = """
from torch._dynamo.utils import counters
@torch.library.custom_op("polycast_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
twice.register_fake(torch.empty_like)
settings = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "cache": {"cache": polycast.WeightCache()},
    **({"int8": {"recipe": "int8"}} if hasattr(polycast, "Int8") else {}),
    **{policy: {"policy": POLICIES[policy]} for policy in ("up", "down")},
}
torch.manual_seed(0)
layer, x = torch.nn.Linear(256, 256, bias=False), torch.randn(64, 256)
def compare(name):
    def function(x):
        with polycast.autocast("cpu", **settings[name]):
            return torch.mm(layer(x), x.T), twice(x.detach())
    counters.clear()
    torch._dynamo.reset()
    with torch.set_grad_enabled(name != "int8"):
        compiled, expected = torch.compile(function, fullgraph=True)(x), function(x)
    if name != "int8":
        compiled[0].float().mean().backward()
    found = counters["aot_autograd"]
    is_right = all(torch.allclose(*each, rtol=0.05, atol=0.5) for each in zip(compiled, expected, strict=True))
    dtypes = " ".join(str(each.dtype).removeprefix("torch.") for each in compiled)
    return [found["autograd_cache_hit"], found["autograd_cache_miss"], dtypes, is_right]
found = {name: compare(name) for name in settings}
with polycast.register_op(twice, "lower_precision_fp"):
    found["registered"] = compare("plain") if sys.argv[1] == "second" else None
print(json.dumps(found))
"""
    with_int8 = ("int8",) if hasattr(polycast, "Int8") else ()
    dtypes = dict.fromkeys(("plain", "cache", *with_int8, "down"), "bfloat16 float32")
    dtypes |= {"float16": "float16 float32", "up": "float32 float32"}
    first = {name: [0, 1, found, True] for name, found in dtypes.items()}
    second = {name: [1, 0, found, True] for name, found in dtypes.items()}
    assert run_over_caches(script, "first") == {**first, "registered": None}
    assert run_over_caches(script, "second") == {**second, "registered": [0, 1, "bfloat16 bfloat16", True]}


def test_code_that_a_process_saved_before_any_policies_is_loaded_for_none(run_over_caches):
    script = """
import torch._dynamo
torch._dynamo.config.caching_precompile = True
compiled = torch.compile(product, fullgraph=True)
if sys.argv[1] == "save":
    compiled(x)
    torch.compiler.save_cache_artifacts()
    print(json.dumps(None))
else:
    with region("up"):
        pass
    compiled = torch.compile(product, fullgraph=True)
    entries = torch._C._dynamo.eval_frame._debug_get_precompile_entries(product.__code__)
    found = [[entry.guard_manager.check({"x": x}) for entry in entries]]
    with region("up", enabled=False):
        found.append([entry.guard_manager.check({"x": x}) for entry in entries])
    print(json.dumps(found))
"""
    run_over_caches(script, "save")
    assert run_over_caches(script, "load") == [[True], [False]]
