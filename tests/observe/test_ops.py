"""What an observation says of ops: calls, dtypes, casts, caches, and which rule decided."""

import types
import typing

import pytest
import torch

import polycast
from polycast.engine import choice, installation
from polycast.observer import loading, recorder
from polycast.toolchain import load
from polycast.toolchain.cpp_library import BuildError, CppLibrary


def rows(seen, op, phase="forward"):
    return [row for row in seen.ops if row.op == op and row.phase == phase]


def row(seen, op, phase="forward"):
    (found,) = rows(seen, op, phase)
    return found


def test_an_op_of_the_table_is_counted_with_its_casts(engine):
    x, y = torch.ones(4, 4), torch.ones(4, 4).bfloat16()
    with polycast.observe() as seen, polycast.autocast("cpu"):
        torch.mm(x, y)
        torch.mm(x, y)
    mm = row(seen, "aten::mm")
    assert (mm.calls, mm.inner_calls) == (2, 0)
    assert mm.input_dtypes == {"float32": 2, "bfloat16": 2}
    assert mm.compute_dtypes == mm.output_dtypes == {"bfloat16": 2}
    assert (mm.casts, mm.cast_bytes, mm.hits, mm.misses) == (2, 2 * 16 * 2, 0, 0)
    assert (mm.policy, mm.rule) == ("lower_precision_fp", "backend's table")


def test_an_op_that_passes_by_autocast_is_counted(engine):
    with polycast.observe() as seen, polycast.autocast("cpu"):
        torch.ones(4).relu()
    relu = row(seen, "aten::relu")
    assert (relu.calls, relu.policy, relu.rule) == (1, None, "none")
    assert relu.output_dtypes == {"float32": 1}


def test_an_op_outside_of_regions_is_counted_once_without_what_it_is_made_of(engine):
    linear, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with torch.no_grad(), polycast.observe() as seen:
        linear(x)
    assert [(each.op, each.calls, each.rule) for each in seen.ops] == [("aten::linear", 1, "autocast is off")]


def test_ops_in_an_op_that_autocast_looks_at_are_counted_as_inner_ones(engine):
    x = torch.ones(4, 4)
    with polycast.observe() as seen, polycast.autocast("cpu"):
        torch.einsum("ij,jk->ik", x, x)
    bmm = row(seen, "aten::bmm")
    assert (bmm.calls, bmm.inner_calls, bmm.policy) == (1, 1, "lower_precision_fp")
    assert row(seen, "aten::einsum").inner_calls == 0


def test_the_casts_of_an_op_are_no_ops_of_the_program(engine):
    x = torch.ones(4, 4)
    with polycast.observe() as seen, polycast.autocast("cpu"):
        torch.mm(x, x)
    assert [each.op for each in seen.ops] == ["aten::mm"]


def test_the_backward_pass_is_apart(engine):
    weight = torch.ones(4, 4, requires_grad=True)
    with polycast.observe() as seen:
        with polycast.autocast("cpu"):
            loss = torch.mm(weight, weight).float().sum()
        loss.backward()
    assert row(seen, "aten::mm").calls == 1
    backward = row(seen, "aten::mm", "backward")
    assert backward.calls == 2
    assert backward.output_dtypes == {"bfloat16": 2}
    assert backward.rule == "autocast is off"


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("aten::exp", lambda x: x.exp()),
        ("aten::cat", lambda x: torch.cat([x, x.float()])),
        ("aten::cumsum", lambda x: x.cumsum(0)),
    ],
)
def test_an_op_says_what_explain_says(engine, op, call):
    x = torch.ones(4).bfloat16()
    with polycast.observe() as seen, polycast.autocast("cpu", policy={"cumsum": "fp32"}):
        call(x)
        told = polycast.explain(op, "cpu")
    found = row(seen, op)
    assert (found.policy, found.rule, found.rule_name) == (
        told.policy and told.policy.value,
        told.rule,
        told.rule_name,
    )


def test_each_rule_that_decided_for_an_op_is_told_with_its_calls(engine):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    policy = polycast.Policy({"linear": "fp32"}, name="careful")
    rules = polycast.Policy(modules={"1": {"linear": "passthrough"}})
    x = torch.ones(1, 2)
    with torch.no_grad(), polycast.observe() as seen:
        with polycast.autocast("cpu"):
            model[0](x), model[0](x), model[0](x)
        with polycast.autocast("cpu", policy=policy):
            model[0](x), model[0](x)
        with polycast.apply_policy(model, rules), polycast.autocast("cpu"):
            model[1](x)
    linear = row(seen, "aten::linear")
    assert [(each.policy, each.rule, each.rule_name, each.calls) for each in linear.decisions] == [
        ("lower_precision_fp", "backend's table", "", 3),
        ("fp32", "region's policy", "careful", 2),
        ("passthrough", "module rule", "1 = {'linear': 'passthrough'}", 1),
    ]
    assert (linear.policy, linear.rule) == ("lower_precision_fp", "backend's table")


def test_an_op_that_is_registered_says_so(engine):
    registered = polycast.register_op("aten::sort", polycast.CastPolicy.FP32)
    with registered, polycast.observe() as seen, polycast.autocast("cpu"):
        torch.ones(4).bfloat16().sort()
    assert (row(seen, "aten::sort").policy, row(seen, "aten::sort").rule) == ("fp32", "register_op")


def test_cached_casts_are_hits_and_others_misses(engine):
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4).bfloat16()
    cache = polycast.WeightCache()
    with torch.no_grad(), polycast.observe() as seen:
        for _ in range(3):
            with polycast.autocast("cpu", cache=cache):
                torch.mm(x, weight)
    mm = row(seen, "aten::mm")
    assert (mm.casts, mm.hits, mm.misses, mm.recasts) == (1, 2, 1, 0)
    assert (cache.stats().hits, cache.stats().misses) == (2, 1)
    (cast,) = seen.casts
    assert (cast.of, cast.source, cast.target, cast.count, cast.bytes) == ("weight", "float32", "bfloat16", 1, 32)


def test_a_weight_that_is_cast_again_unchanged_is_a_recast(engine):
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4).bfloat16()
    with torch.no_grad(), polycast.observe() as seen:
        for _ in range(3):
            with polycast.autocast("cpu"):
                torch.mm(x, weight)
        weight.add_(1)
        with polycast.autocast("cpu"):
            torch.mm(x, weight)
    assert (row(seen, "aten::mm").casts, row(seen, "aten::mm").recasts) == (4, 2)


@pytest.mark.parametrize("timing", [True, False])
def test_times_are_taken_where_they_are_asked_for(engine, timing):
    with polycast.observe(timing=timing) as seen, polycast.autocast("cpu"):
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    mm = row(seen, "aten::mm")
    assert (mm.cast_seconds > 0) == timing
    assert (sum(mm.seconds.values()) > mm.cast_seconds) == timing
    assert (seen.fast_time_share is not None) == timing


def test_the_stack_of_the_first_call_is_kept(engine):
    def called():
        return torch.ones(4).relu()

    with polycast.observe(stacks=True) as seen:
        for _ in range(2):
            called()
    assert row(seen, "aten::relu").stack[-1].endswith(" called")
    assert "test_ops.py" in row(seen, "aten::relu").stack[-1]


def test_inputs_in_lists_and_outputs_in_lists_are_counted(engine):
    with polycast.observe() as seen:
        torch.cat([torch.ones(2), torch.ones(2)]).split(2)
    assert row(seen, "aten::cat").input_dtypes == {"float32": 2}
    assert row(seen, "aten::split.Tensor").output_dtypes == {"float32": 2}


def test_a_custom_op_is_counted(engine):
    @torch.library.custom_op("polycast_observe::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    with polycast.observe() as seen:
        torch.ops.polycast_observe.twice(torch.ones(4))  # twice() itself passes by the dispatcher from torch 2.15 on
    assert row(seen, "polycast_observe::twice").calls == 1


def test_an_observation_without_timing_has_no_times_of_ops_that_one_beside_it_has_timed(engine):
    with polycast.autocast("cpu"), polycast.observe() as seen, polycast.observe(timing=True) as timed:
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    assert row(timed, "aten::mm").cast_seconds > 0
    assert (row(seen, "aten::mm").seconds, row(seen, "aten::mm").cast_seconds, seen.fast_time_share) == ({}, 0.0, None)


def test_an_op_has_no_time_that_ran_when_the_first_observation_with_timing_began(engine):
    timed = polycast.observe(timing=True)

    @torch.library.custom_op("polycast_observe::begins", mutates_args=())
    def begins(x: torch.Tensor) -> torch.Tensor:
        timed.__enter__()
        return x + x

    with polycast.observe() as seen:
        torch.ops.polycast_observe.begins(torch.ones(4))
        timed.__exit__(None, None, None)
    assert (row(seen, "polycast_observe::begins").calls, row(seen, "polycast_observe::begins").seconds) == (1, {})


def test_an_op_under_a_dispatch_mode_is_counted_once(engine):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with polycast.observe() as seen, polycast.autocast("cpu"), Mode():
        torch.ones(4).relu()
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    assert (row(seen, "aten::relu").calls, row(seen, "aten::mm").calls) == (1, 1)


def test_what_raises_is_counted_too_and_what_was_seen_is_kept(engine):
    observer = polycast.observe()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), observer as seen:
        torch.mm(torch.ones(4).relu().view(2, 2), torch.ones(3, 3))
    assert (row(seen, "aten::relu").calls, row(seen, "aten::mm").calls) == (1, 1)


def test_it_can_be_read_while_it_goes_on(engine):
    with polycast.observe() as seen:
        torch.ones(4).relu()
        before = row(seen, "aten::relu").calls
        torch.ones(4).relu()
        assert (before, row(seen, "aten::relu").calls) == (1, 2)


def test_a_program_whose_folder_has_gone_is_observed(engine, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with polycast.observe(stacks=True) as seen, polycast.autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert "test_ops.py:" in seen.regions[0].where
    assert "test_ops.py:" in row(seen, "aten::mm").stack[-1]


def test_regions_are_told_by_place(engine):
    with polycast.observe() as seen:
        for _ in range(2):
            with polycast.autocast("cpu"):
                torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    (region,) = seen.regions
    assert "test_ops.py:" in region.where
    assert (region.device, region.dtype, region.enabled) == ("cpu", "bfloat16", True)
    assert (region.entries, region.unused) == (2, 0)
    assert region.ops >= 2


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module or None, got int"),
        ({"timing": 1}, TypeError, "timing must be a bool, got 1"),
        ({"stacks": "yes"}, TypeError, "stacks must be a bool, got 'yes'"),
        ({"nonfinite": "stop"}, ValueError, "nonfinite must be one of 'ignore', 'record', 'raise', got 'stop'"),
        ({"threads": 4}, ValueError, "threads must be one of 'this', 'all', got 4"),
    ],
)
def test_options_that_are_none_are_refused(arguments, error, text):
    with pytest.raises(error) as raised:
        polycast.observe(**arguments)
    assert str(raised.value) == text


def test_leaving_what_was_not_entered_is_refused():
    with pytest.raises(RuntimeError, match="this observer was not entered"):
        polycast.observe().__exit__(None, None, None)


@pytest.fixture
def choose_engine(monkeypatch):
    """Return a function that sets POLYCAST_ENGINE and chooses the engine again."""

    def choose(name):
        monkeypatch.setenv("POLYCAST_ENGINE", name)
        installation.forget_choice()
        return choice.choose()

    yield choose
    installation.forget_choice()


def test_the_reference_engine_cannot_be_observed(choose_engine):
    choose_engine("reference")
    with pytest.raises(RuntimeError) as raised:
        polycast.observe().__enter__()
    assert str(raised.value) == (
        "polycast.observe needs the native engine, and this process runs on the reference engine, which cannot be "
        "observed: POLYCAST_ENGINE=reference. Unset it."
    )


def test_without_a_compiler_the_error_says_why_there_is_no_native_engine(choose_engine, monkeypatch):
    monkeypatch.setattr(load, "try_build", lambda _: BuildError("no C++ compiler is found. Install one (c++)."))
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler is found"):
        choose_engine("auto")
    with pytest.raises(RuntimeError) as raised:
        polycast.observe().__enter__()
    assert str(raised.value) == (
        "polycast.observe needs the native engine, and this process runs on the reference engine, which cannot be "
        "observed: the native engine cannot be built: no C++ compiler is found. Install one (c++)."
    )


def test_where_the_observer_cannot_be_built_regions_run_and_there_is_a_reason(choose_engine, monkeypatch):
    def fails(*_, **options):
        raise BuildError("no room is left.")

    choose_engine("native")
    monkeypatch.setattr(loading, "_observers", {})
    monkeypatch.setattr(load, "get_or_build", fails)
    with polycast.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"^polycast.observe needs C\+\+ that cannot be built: no room is left\.$"):
        polycast.observe().__enter__()


def test_an_observer_of_other_sources_than_the_engines_is_not_loaded(choose_engine, monkeypatch):
    choose_engine("native")
    monkeypatch.setattr(loading, "_observers", {})
    monkeypatch.setattr(CppLibrary, "read_sources", lambda _: {"binding.cpp": b"// of the next version"})
    with pytest.raises(RuntimeError, match=r"has changed since its engine was loaded\. Restart the program\.$"):
        polycast.observe().__enter__()


def test_the_names_of_enumerations_are_checked_when_the_observer_is_loaded(choose_engine, monkeypatch):
    choose_engine("native")
    monkeypatch.setattr(loading, "_observers", {})
    monkeypatch.setattr(loading, "CHAIN_KINDS", ("round_trip", "loss"))
    with pytest.raises(RuntimeError, match="the names of an enumeration differ"):
        polycast.observe().__enter__()


def test_the_rows_of_counts_have_the_types_that_python_expects(engine):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    observer = polycast.observe(model, nonfinite="record", stacks=True, timing=True)
    with observer, polycast.autocast("cpu"):
        model(torch.ones(2, 4)).log().sum().backward()
        torch.ones(2).log().div(0)
        reading = recorder.read(observer._running[-1]._recorder)
    casts, sources = ([each for row in reading.counts for each in getattr(row, name)] for name in ("casts", "sources"))
    for rows in (reading.counts, casts, sources, reading.chains, reading.regions, [reading.nonfinite]):
        assert rows
        for row in rows:
            for name, hint in typing.get_type_hints(type(row)).items():
                kinds = [typing.get_origin(each) or each for each in typing.get_args(hint) or [hint]]
                if typing.get_origin(hint) is not None and typing.get_origin(hint) is not types.UnionType:
                    kinds = [typing.get_origin(hint)]
                assert isinstance(getattr(row, name), tuple(kinds)), (type(row).__name__, name)


def test_the_stack_of_an_op_that_raises_is_kept_and_its_error_is_raised(engine):
    def refuse(tensor):
        raise LookupError("refused")

    x = torch.ones(4, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(refuse, refuse)
    with polycast.observe(stacks=True) as seen, hooks, pytest.raises(LookupError, match="refused"):
        x.exp()
    assert "test_ops.py" in row(seen, "aten::exp").stack[-1]
