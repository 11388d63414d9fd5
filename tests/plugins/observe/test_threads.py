"""Observed threads, nested observers, and observers that end early."""

import os
import threading

import pytest
import torch
from torch._dynamo.callback import CompilationCallbackHandler

import polycast
from polycast.plugin import events
from polycast_plugins.observe import observer_library
from polycast_plugins.observe.observer_library import load_observer
from polycast_plugins.observe.recorder import read


def calls(seen, op="aten::relu"):
    return sum(row.calls for row in seen.ops if row.op == op)


X = torch.ones(4)


def test_all_threads_are_observed_on_request(engine, in_thread):
    def compute():
        with polycast.autocast("cpu"):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    with polycast.observe() as this, polycast.observe(threads="all") as seen:
        in_thread(compute)
        compute()
    (mm,) = [row for row in seen.ops if row.op == "aten::mm"]
    assert (mm.calls, mm.casts, mm.policy) == (2, 4, "lower_precision_fp")
    assert [sum(region.entries for region in each.regions) for each in (this, seen)] == [1, 2]
    assert calls(this, "aten::mm") == 1


def test_thread_is_not_counted_after_the_block(engine):
    go, on = threading.Barrier(2), threading.Barrier(2)

    def compute():
        X.relu()
        go.wait()
        on.wait()
        X.relu()

    thread = threading.Thread(target=compute)
    with polycast.observe(threads="all") as seen:
        thread.start()
        go.wait()
    on.wait()
    thread.join()
    assert calls(seen) == 1


def test_nested_observers_each_see_everything(engine):
    observer = polycast.observe()
    with observer as outer:
        X.relu()
        with polycast.observe(threads="all") as middle:
            X.relu()
            with observer as inner:
                X.relu()
            X.relu()
        X.relu()
    with observer as later:
        X.relu()
    assert [calls(seen) for seen in (outer, middle, inner, later)] == [5, 3, 1, 1]


def test_an_observer_can_be_left_on_another_thread(engine, in_thread):
    observer = polycast.observe()
    seen = observer.__enter__()
    X.relu()
    in_thread(lambda: observer.__exit__(None, None, None))
    X.relu()
    assert calls(seen) == 1
    with polycast.observe() as again:
        X.relu()
    assert calls(again) == 1


NEVER_LEFT = """
import threading, torch, polycast
kept = []
thread = threading.Thread(target=lambda: kept.append(polycast.observe().__enter__()))
thread.start()
thread.join()
with polycast.autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
print(len(kept[0].ops))
"""


@pytest.mark.slow
def test_observer_that_is_never_left_ends_with_the_process(run_program, engine):
    assert run_program(NEVER_LEFT, engine) == (0, "0\n", "")


def test_observer_of_ended_thread_has_its_counts_and_sees_no_later_thread(engine, in_thread):
    def begin():
        seen = observer.__enter__()
        X.relu()
        return seen

    def observe_another():
        with polycast.observe():
            X.relu()

    observer = polycast.observe()
    seen = in_thread(begin)
    for _ in range(4):  # of which one has the memory of the first, and what the system tells threads by
        in_thread(observe_another)
    observer.__exit__(None, None, None)
    assert calls(seen) == 1


def test_exception_ends_the_inner_observer_only(engine):
    with polycast.observe() as outer:
        observer = polycast.observe()
        with pytest.raises(RuntimeError, match="shape"), observer as inner:
            X.relu().view(3)
        X.relu()
    assert (calls(outer), calls(inner)) == (2, 1)


def test_backward_pass_on_other_threads_is_observed(engine):
    class Reenters(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                inner = torch.ones(2, requires_grad=True)
                inner.relu().sum().backward()
            return grad

    with polycast.observe() as seen:
        x = torch.ones(2, requires_grad=True)
        for _ in range(3):
            x = Reenters.apply(x)
        x.sum().backward()
    assert calls(seen, "aten::threshold_backward") == 3


@pytest.mark.slow
def test_memory_does_not_grow_with_calls(engine):
    weight, x = torch.ones(1), torch.ones(1)

    def size(rounds):
        with polycast.observe(stacks=True) as seen, polycast.autocast("cpu"), torch.no_grad():
            for _ in range(rounds):
                weight.add_(x)
        assert calls(seen, "aten::add_.Tensor") == rounds
        return len(str(seen.to_dict()))

    few = size(1_000)
    before = _resident()
    assert size(1_000_000) < 1.1 * few
    assert _resident() - before < 20e6


def _resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_child_observes_separately(engine):
    with polycast.observe() as seen:
        X.relu()
        child = os.fork()
        if child == 0:
            X.relu()
            os._exit(0 if calls(seen) == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert calls(seen) == 1


def test_ended_threads_leave_only_their_counts(engine, in_thread):
    observer = polycast.observe(threads="all")
    with observer as seen:
        for _ in range(200):
            in_thread(X.relu)
        rows = [row for row in read(observer._running[-1]._recorder).counts if row.op == "aten::relu"]
    assert calls(seen) == 200
    assert len(rows) < 10  # the last of them may be about to end


def test_modules_are_counted_on_all_threads_and_by_graphs_of_ended_ones(engine, in_thread):
    net, x = torch.nn.Sequential(torch.nn.Tanh()), torch.ones(4, requires_grad=True)
    with polycast.observe(net, threads="all") as seen:
        in_thread(lambda: net(x)).sum().backward()
    assert [module.entries for module in seen.modules] == [1, 1]
    backward = [(op.phase, op.calls) for op in seen.modules[1].ops if op.op == "aten::tanh_backward"]
    assert backward == [("backward", 1)]


def test_file_name_may_be_invalid_unicode(engine):
    code = "with polycast.autocast('cpu'):\n    X.relu()"
    with polycast.observe(stacks=True) as seen:
        exec(compile(code, "gr\udcc3\udcb6ße.py", "exec"), {"polycast": polycast, "X": X})
    assert [region.where for region in seen.regions] == ["gr\\udcc3\\udcb6ße.py:1"]
    assert any(line.startswith("gr\\udcc3\\udcb6ße.py:2") for op in seen.ops for line in op.stack)


def test_observers_may_start_and_stop_while_a_stack_is_taken(engine, monkeypatch):
    def observe_others():
        monkeypatch.undo()
        for _ in range(3):
            with polycast.observe():
                X.tanh()
        return "/"

    with polycast.observe(stacks=True) as outer, polycast.observe(stacks=True) as inner:
        monkeypatch.setattr(observer_library.os, "getcwd", observe_others)
        X.relu()
    assert calls(outer) == calls(inner) == 1
    assert calls(outer, "aten::tanh") == calls(inner, "aten::tanh") == 3


def test_error_of_signal_handler_while_a_stack_is_taken_is_raised(engine, monkeypatch):
    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    with polycast.observe(stacks=True) as seen:
        monkeypatch.setattr(observer_library.os, "getcwd", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(map(torch.relu, [X]))
    assert calls(seen) == 1


def test_interrupted_start_leaves_nothing_in_torch(engine, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(events.recipe_call, "add", interrupted)
    handler = CompilationCallbackHandler
    before = torch.nn.Module.__call__, handler.install_callbacks
    with pytest.raises(KeyboardInterrupt):
        polycast.observe(torch.nn.ReLU()).__enter__()
    assert (torch.nn.Module.__call__, handler.install_callbacks) == before


@pytest.mark.usefixtures("switching_often")  # an op waits for the other thread's turn to end
def test_each_op_is_counted_while_other_recorders_start_and_stop(engine):
    counted, observer = threading.Event(), load_observer()

    def observe_all():
        while not counted.is_set():
            recorder = observer.Recorder(True, False, 0, False, False)
            recorder.start()
            recorder.stop()

    other = threading.Thread(target=observe_all)
    other.start()
    try:
        with polycast.observe() as seen:
            for _ in range(20_000):
                X.relu()
    finally:
        counted.set()
        other.join()
    assert [(row.op, row.calls) for row in seen.ops] == [("aten::relu", 20_000)]
