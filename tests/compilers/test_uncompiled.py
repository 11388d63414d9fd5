"""A torch whose compiler is not the one that can be given a guard: what is called under policies runs uncompiled."""

import contextlib
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import polycast
from polycast import CastPolicy

pytestmark = [
    pytest.mark.usefixtures("engine"),
    # torch 2.12 says so of each function that runs uncompiled, where its own stance force_eager is set too.
    pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames"),
]
X = torch.ones(2, 2)
MM_UP = {"aten::mm": CastPolicy.FP32}
HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _nothing_left_installed(_fresh_dynamo):
    yield
    polycast.uninstall()


def without_source(monkeypatch):
    monkeypatch.delattr("torch._dynamo.source.GlobalStateSource")


def without_cache_details(monkeypatch):
    monkeypatch.delattr("torch._functorch._aot_autograd.autograd_cache.AOTAutogradCacheDetails")


def with_another_guard_manager(monkeypatch):
    monkeypatch.delattr("torch._C._dynamo.guards.RootGuardManager.add_epilogue_lambda_guard")


def with_guards_that_do_nothing(monkeypatch):
    monkeypatch.setattr("torch._C._dynamo.guards.RootGuardManager.add_epilogue_lambda_guard", lambda *_: None)


MISSING = [without_source, without_cache_details, with_another_guard_manager, with_guards_that_do_nothing]


@pytest.fixture(name="unknown_torch", params=MISSING)
def _unknown_torch(request, monkeypatch):
    import torch._functorch._aot_autograd.autograd_cache  # noqa: F401 - what compiles with inductor imports it

    request.param(monkeypatch)


@contextlib.contextmanager
def one_warning():
    with pytest.warns(UserWarning, match=r"cannot have the compiler of this torch .* tell policies apart") as said:
        yield
    assert len([warning for warning in said if "polycast" in str(warning.message)]) == 1


def policy(policies=None):
    return polycast.autocast("cpu", policy=policies)


def product(x):
    return torch.mm(x, x)


@pytest.mark.usefixtures("unknown_torch")
def test_a_compiled_function_runs_uncompiled_under_policies_only():
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


@pytest.fixture(name="known_as_unknown")
def _known_as_unknown(monkeypatch):
    without_source(monkeypatch)


@pytest.mark.usefixtures("known_as_unknown")
def test_other_threads_run_compiled_meanwhile(in_thread):
    compiled = torch.compile(product, backend=(counter := CompileCounterWithBackend("eager")), fullgraph=True)
    with one_warning(), policy(MM_UP):
        in_thread(lambda: compiled(X))
        assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("known_as_unknown")
@pytest.mark.parametrize("how", ["block", "decorator", "snapshot", "generator"])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_a_compiled_function_that_enters_policies_goes_on_uncompiled(how):
    """What it calls under them is neither compiled under them nor taken from what was compiled without."""

    @torch._dynamo.disable(recursive=False)
    def apart(x):
        return product(x)

    def under_policies(x):
        if how == "block":
            with policy(MM_UP):
                return apart(x)
        if how == "decorator":
            return policy(MM_UP)(apart)(x)
        if how == "snapshot":
            with snapshot.apply():
                return apart(x)
        return next(policy(MM_UP)(stepwise)(x))

    def stepwise(x):
        yield apart(x)

    def function(x):
        torch._dynamo.graph_break()
        before = apart(x)
        torch._dynamo.graph_break()
        inside = under_policies(x)
        torch._dynamo.graph_break()
        return before, inside, apart(x)

    with one_warning(), policy(MM_UP):
        snapshot = polycast.capture()
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        with policy():
            assert [y.dtype for y in compiled(X)] == [HALF, SINGLE, HALF]
        assert [y.dtype for y in compiled(X)] == [SINGLE] * 3


@pytest.mark.usefixtures("known_as_unknown")
def test_a_stance_that_was_set_is_kept_and_one_that_is_set_later_is_heeded():
    compiled = torch.compile(product, backend=(counter := CompileCounterWithBackend("eager")), fullgraph=True)
    with one_warning(), torch.compiler.set_stance("force_eager"), policy(MM_UP):
        compiled(X)
    compiled(X)
    assert counter.frame_count == 1
    with torch.compiler.set_stance("default"), policy(MM_UP):
        assert compiled(X).dtype is SINGLE
    assert counter.frame_count == 1


def test_a_torch_that_is_known_has_no_warning_and_its_stance_untouched():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with policy(MM_UP):
            torch.compile(product, backend="eager", fullgraph=True)(X)
    assert type(torch._dynamo.eval_frame._stance.stance) is str
