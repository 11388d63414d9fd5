"""A torch whose Dynamo cannot be given a guard on overrides: compiled functions run eagerly."""

import contextlib

import pytest
import torch
import torch._functorch._aot_autograd.autograd_cache  # what compiles with inductor imports it
from torch._dynamo.testing import CompileCounterWithBackend

import polycast
from polycast import CastPolicy
from polycast.compilers import guards

pytestmark = [
    pytest.mark.usefixtures("engine"),
    # torch 2.12 warns of each function that runs eagerly, also where its own stance force_eager is set.
    pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames"),
]
X = torch.ones(2, 2)
MM_UP = {"aten::mm": CastPolicy.FP32}
HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _nothing_left_installed(_fresh_dynamo):
    yield
    polycast.uninstall()


GUARD = "torch._C._dynamo.guards.RootGuardManager.add_epilogue_lambda_guard"
SOURCE = "torch._dynamo.source.GlobalStateSource"
KEY = "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCacheDetails"
DOES_NOTHING = "the guard does nothing"


@pytest.fixture(params=[SOURCE, KEY, GUARD, DOES_NOTHING])
def unknown_torch(request, monkeypatch):
    if request.param == DOES_NOTHING:
        monkeypatch.setattr(GUARD, lambda *_: None)
    else:
        monkeypatch.delattr(request.param)


@pytest.fixture
def lacks_source(monkeypatch):
    monkeypatch.delattr(SOURCE)


@contextlib.contextmanager
def one_warning():
    with pytest.warns(UserWarning, match=r"cannot make the compiler of this torch .* distinguish policies") as said:
        yield
    assert len([warning for warning in said if "polycast" in str(warning.message)]) == 1


def policy(policies=None):
    return polycast.autocast("cpu", policy=policies)


def product(x):
    return torch.mm(x, x)


def test_compiled_functions_run_eagerly_from_the_first_policy_on_until_uninstalling(unknown_torch):
    compiled = torch.compile(product, backend=(counter := CompileCounterWithBackend("aot_eager")), fullgraph=True)
    with policy():
        assert compiled(X).dtype is HALF
    with one_warning():
        for _ in range(2):
            with policy(MM_UP):
                assert compiled(X).dtype is SINGLE
                with policy({"aten::mm": CastPolicy.LOWER_PRECISION_FP}):
                    assert compiled(X).dtype is HALF
            with policy():
                assert compiled(X).dtype is HALF
    assert counter.frame_count == 1
    polycast.uninstall()
    assert torch.compile(lambda x: x + 1, backend=counter, fullgraph=True)(X).dtype is SINGLE
    assert counter.frame_count == 2


def test_the_stance_of_the_user_is_restored_by_uninstalling(lacks_source):
    with torch.compiler.set_stance("fail_on_recompile"):
        with one_warning(), policy(MM_UP):
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        polycast.uninstall()
        assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"


def test_a_stance_that_is_set_later_is_overruled_in_the_next_region(lacks_source):
    compiled = torch.compile(product, backend=(counter := CompileCounterWithBackend("eager")), fullgraph=True)
    region = policy(MM_UP)
    with one_warning(), torch.compiler.set_stance("force_eager"), region:
        compiled(X)
    with torch.compiler.set_stance("default"), region:
        assert compiled(X).dtype is SINGLE
    assert counter.frame_count == 0


def test_a_torch_that_is_known_has_no_warning_and_its_stance_untouched():
    with policy(MM_UP):
        torch.compile(product, backend="eager", fullgraph=True)(X)
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.filterwarnings("ignore:.*cannot make the compiler of this torch")
def test_setting_the_stance_again_keeps_nothing(lacks_source):
    for _ in range(10):
        with torch.compiler.set_stance("default"), policy(MM_UP):
            pass
    assert len(guards._replaced) == 1
