"""Compiled code runs only under the policies that it was compiled for, and equal ones."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import polycast
from polycast import CastPolicy
from polycast.engine.snapshot import overrides_text
from polycast.policy.names import OpName

pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
HALF, SINGLE = torch.bfloat16, torch.float32
TANH_DOWN, MM_UP = {"aten::tanh": CastPolicy.LOWER_PRECISION_FP}, {"aten::mm": CastPolicy.FP32}
X = torch.ones(2, 2)


def dtypes(x):
    """Compute two ops: in bfloat16 and float32 by the table, and in other dtypes under each policy above."""
    return torch.mm(x, x), torch.tanh(x)


def policy(policies=None):
    return polycast.autocast("cpu", policy=policies)


class Compiled:
    """The function above, compiled. A call checks the dtypes of the results against eager code, and returns them."""

    def __init__(self, backend="aot_eager", **options):
        self.counter = CompileCounterWithBackend(backend)
        self._function = torch.compile(dtypes, backend=self.counter, **{"fullgraph": True, **options})

    def __call__(self):
        found = tuple(y.dtype for y in self._function(X))
        assert found == tuple(y.dtype for y in dtypes(X))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_other_policies_recompile_and_equal_ones_do_not(backend):
    compiled = Compiled(backend)
    for _ in range(2):
        assert compiled() == (SINGLE, SINGLE)
        assert policy()(compiled)() == (HALF, SINGLE)
        assert policy(TANH_DOWN)(compiled)() == (HALF, HALF)
        with policy(MM_UP):
            assert compiled() == (SINGLE, SINGLE)
            assert policy(TANH_DOWN)(compiled)() == (SINGLE, HALF)
            assert policy(TANH_DOWN)(policy(dict(MM_UP))(compiled))() == (SINGLE, HALF)
            assert polycast.autocast("cpu", enabled=False)(compiled)() == (SINGLE, SINGLE)
            snapshot = polycast.capture()
        with snapshot.apply():
            assert compiled() == (SINGLE, SINGLE)
        with policy(TANH_DOWN):
            assert compiled() == (HALF, HALF)
    assert compiled.counter.frame_count == 6


@pytest.mark.slow
def test_a_thousand_policies_differ():
    ops = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))[:1000]
    texts = set()
    for op in ops:
        with policy({OpName.of_overload(op).key: CastPolicy.PASSTHROUGH}):
            texts.add(overrides_text())
    assert len(texts) == 1000
    compiled = Compiled(fullgraph=False)
    for op in ops[:3]:
        assert policy({op: CastPolicy.PASSTHROUGH})(compiled)() == (HALF, SINGLE)
    assert compiled.counter.frame_count == 3


@pytest.mark.parametrize("forward", [None, TANH_DOWN])
def test_a_custom_backward_runs_under_the_policies_of_its_forward(forward):
    class Double(torch.autograd.Function):
        @staticmethod
        @polycast.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @polycast.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            calls.append(compiled())
            return grad * 2

    compiled, calls = Compiled(), []
    with policy(forward):
        loss = Double.apply(X.clone().requires_grad_()).sum()
        of_forward = compiled()
    with policy(MM_UP):
        before = compiled()
        loss.backward()
        assert compiled() == before == (SINGLE, SINGLE)
    assert calls == [of_forward] == [(HALF, SINGLE if forward is None else HALF)]


def test_a_generators_policies_override_those_of_its_caller():
    compiled = Compiled()

    @policy(TANH_DOWN)
    def steps():
        while True:
            yield compiled()

    generator = steps()
    for around, inside in ((MM_UP, (SINGLE, HALF)), (None, (HALF, HALF)), (MM_UP, (SINGLE, HALF))):
        with policy(around):
            before = compiled()
            assert next(generator) == inside
            assert compiled() == before
    generator.close()


def test_the_guard_follows_regions_left_out_of_order():
    compiled, first, second = Compiled(), policy(MM_UP), policy(TANH_DOWN)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    compiled()
    second.__exit__(None, None, None)
    assert compiled() == (SINGLE, SINGLE)


def test_policies_of_a_disabled_region_reach_a_region_in_compiled_code():
    """Autocast is off, as outside of all regions, but the compiled code enables it."""

    def function(x):
        with polycast.autocast("cpu"):
            return torch.tanh(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert compiled(X).dtype is SINGLE
        with policy(TANH_DOWN), polycast.autocast("cpu", enabled=False):
            assert compiled(X).dtype is HALF


def test_a_graph_break_keeps_the_policies():
    def function(x):
        y = torch.mm(x, x)
        torch._dynamo.graph_break()
        return y, torch.tanh(x)

    compiled = torch.compile(function, backend=(counter := CompileCounterWithBackend("aot_eager")))
    for _ in range(2):
        for policies in (None, MM_UP, TANH_DOWN):
            with policy(policies):
                assert [y.dtype for y in compiled(X)] == [y.dtype for y in dtypes(X)]
    assert counter.frame_count == 6


def test_threads_have_their_own_policies_over_one_compiled_function():
    compiled, barrier = Compiled(), threading.Barrier(3)
    for policies in (None, MM_UP, TANH_DOWN):  # before torch 2.14 no thread may begin while another traces
        policy(policies)(compiled)()

    def work(policies):
        barrier.wait()
        for _ in range(20):
            with policy(policies):
                compiled()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, (None, MM_UP, TANH_DOWN)))
    assert compiled.counter.frame_count == 3


def test_a_guard_names_the_policies_that_it_was_made_for():
    reasons = []
    compiled = torch._dynamo.optimize("eager", guard_fail_fn=lambda failure: reasons.append(failure.reason))(dtypes)
    compiled(X)
    with polycast.autocast("cpu", enabled=False, policy=MM_UP):
        compiled(X)
    assert "policies of polycast.autocast == ''" in reasons[0]


@pytest.mark.slow
def test_code_compiled_before_any_policies_is_reused_without_policies():
    ways = [{}]
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # from torch 2.13 on
        ways.append({"isolate_recompiles": True})
    functions = [Compiled(**way) for way in ways]
    for function in 2 * functions:
        assert function() == (SINGLE, SINGLE)
        assert policy()(function)() == (HALF, SINGLE)
        assert policy(TANH_DOWN)(function)() == (HALF, HALF)
    assert {function.counter.frame_count for function in functions} == {3}


def test_code_being_compiled_while_the_guard_is_installed_is_for_no_policies():
    """The first policies of the process are those of a backend, in the middle of a compilation."""

    def backend(graph, inputs):
        with policy(MM_UP):
            return graph

    compiled = torch.compile(dtypes, backend=backend, fullgraph=True)
    assert [y.dtype for y in compiled(X)] == [SINGLE, SINGLE]
    (entry,) = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(dtypes.__code__)
    with polycast.autocast("cpu", enabled=False, policy=MM_UP):
        assert not entry.guard_manager.check({"x": X})
    assert entry.guard_manager.check({"x": X})
