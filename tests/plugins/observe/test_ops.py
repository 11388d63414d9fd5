"""Counts by op: calls, dtypes, casts, cache hits, and the rule that decided."""

import pytest
import torch
from tests.plugins.modes import Seen

import polycast


def row(seen, op, phase="forward"):
    (found,) = (row for row in seen.ops if row.op == op and row.phase == phase)
    return found


def observed(call, **options):
    """Return what is seen of a call in a region."""
    with polycast.observe(**options) as seen, polycast.autocast("cpu"):
        call()
    return seen


def test_op_with_policy_is_counted_with_its_casts(engine):
    x, y = torch.ones(4, 4), torch.ones(4, 4).bfloat16()
    with polycast.observe() as seen, polycast.autocast("cpu"):
        torch.mm(x, y)
        torch.mm(x, y)
    (mm,) = seen.ops  # and no op for the casts
    assert (mm.op, mm.calls, mm.inner_calls) == ("aten::mm", 2, 0)
    assert mm.input_dtypes == {"float32": 2, "bfloat16": 2}
    assert mm.compute_dtypes == mm.output_dtypes == {"bfloat16": 2}
    assert (mm.casts, mm.cast_bytes, mm.hits, mm.misses) == (2, 2 * 16 * 2, 0, 0)
    assert (mm.policy, mm.rule) == ("lower_precision_fp", "backend's table")


def test_ops_without_tensors_are_not_counted(engine):
    with torch.library._scoped_library("polycast_tests", "DEF") as library:
        library.define("best_isa() -> int")
        library.define("ones(int[] sizes) -> Tensor[]")
        library.impl("best_isa", lambda: 1, "CompositeExplicitAutograd")
        library.impl("ones", lambda sizes: [torch.ones(sizes)], "CompositeExplicitAutograd")
        with polycast.observe() as seen, polycast.autocast("cpu"):
            torch.ops.polycast_tests.best_isa()
            torch.ops.polycast_tests.ones([2])
    assert {each.op for each in seen.ops if "tests" in each.op} == {"polycast_tests::ones"}


@pytest.mark.parametrize("recipe", ["none", "int8", "int4"])
def test_ops_that_polycast_asks_are_not_counted(engine, recipe, tmp_path):
    model, cache, x = torch.nn.Linear(64, 64), polycast.WeightCache(), torch.ones(2, 64)
    polycast.uninstall()  # so that the first region asks what the processor can do
    with polycast.observe(threads="all") as seen, torch.no_grad():
        with polycast.autocast("cpu", cache=cache, recipe=recipe):
            model(x)
        cache.save(tmp_path / "saved", model)
        with polycast.autocast("cpu", cache=polycast.WeightCache.load(tmp_path / "saved", model), recipe=recipe):
            model(x)
    assert [(each.op, each.calls) for each in seen.ops] == [("aten::linear", 2)]


def test_op_outside_of_regions_is_counted_without_inner_ops(engine):
    linear, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with torch.no_grad(), polycast.observe() as seen:
        linear(x)
    assert [(each.op, each.calls, each.rule) for each in seen.ops] == [("aten::linear", 1, "autocast is off")]


def test_inner_ops_that_autocast_looks_at_are_counted(engine):
    seen = observed(lambda: torch.einsum("ij,jk->ik", torch.ones(4, 4), torch.ones(4, 4)))
    bmm = row(seen, "aten::bmm")
    assert (bmm.calls, bmm.inner_calls, bmm.policy) == (1, 1, "lower_precision_fp")
    assert row(seen, "aten::einsum").inner_calls == 0


def test_backward_pass_is_separate(engine):
    weight = torch.ones(4, 4, requires_grad=True)
    with polycast.observe() as seen:
        with polycast.autocast("cpu"):
            loss = torch.mm(weight, weight).float().sum()
        loss.backward()
    assert row(seen, "aten::mm").calls == 1
    backward = row(seen, "aten::mm", "backward")
    assert (backward.calls, backward.output_dtypes, backward.rule) == (2, {"bfloat16": 2}, "autocast is off")


EXPLAINED = {
    "aten::exp": lambda x: x.exp(),
    "aten::relu": lambda x: x.relu(),
    "aten::cat": lambda x: torch.cat([x, x.float()]),
    "aten::cumsum": lambda x: x.cumsum(0),
}


@pytest.mark.parametrize("op", EXPLAINED)
def test_op_agrees_with_explain(engine, op):
    with polycast.observe() as seen, polycast.autocast("cpu", policy={"cumsum": "fp32"}):
        EXPLAINED[op](torch.ones(4).bfloat16())
        explained = polycast.explain(op, device_type="cpu")
    found = row(seen, op)
    policy = explained.policy and explained.policy.value
    assert (found.policy, found.rule, found.rule_name) == (policy, explained.rule, explained.rule_name)


def test_each_decision_has_its_calls(engine):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    policy = polycast.Policy({"linear": "fp32"}, name="careful")
    rules = polycast.Policy(modules={"1": {"linear": "passthrough", "output": "float16"}})
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
        ("passthrough", "module rule", "1 = {'linear': 'passthrough', 'output': 'float16'}", 1),
    ]
    assert (linear.policy, linear.rule) == ("lower_precision_fp", "backend's table")
    assert row(seen, "aten::to.dtype").output_dtypes == {"float16": 1}


def test_registered_op_has_its_rule(engine):
    with polycast.register_op("aten::sort", polycast.CastPolicy.FP32):
        sort = row(observed(lambda: torch.ones(4).bfloat16().sort()), "aten::sort")
    assert (sort.policy, sort.rule) == ("fp32", "register_op")


def test_cached_casts_are_hits(engine):
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


@pytest.mark.parametrize("storage_has_object", [False, True])
def test_casting_an_unchanged_weight_again_is_a_recast(engine, storage_has_object):
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4).bfloat16()
    if storage_has_object:
        weight.untyped_storage()  # the storage keeps the object in Python
    with torch.no_grad(), polycast.observe() as seen:
        for _ in range(3):
            with polycast.autocast("cpu"):
                torch.mm(x, weight)
        weight.add_(1)
        with polycast.autocast("cpu"):
            torch.mm(x, weight)
    assert (row(seen, "aten::mm").casts, row(seen, "aten::mm").recasts) == (4, 2)


def test_times_are_measured_on_request(engine):
    with polycast.observe() as seen:
        timed = observed(lambda: torch.mm(torch.ones(64, 64), torch.ones(64, 64)), timing=True)
    mm = row(timed, "aten::mm")
    assert sum(mm.seconds.values()) > mm.cast_seconds > 0
    assert timed.fast_time_share is not None
    assert (row(seen, "aten::mm").seconds, row(seen, "aten::mm").cast_seconds, seen.fast_time_share) == ({}, 0.0, None)


def test_the_stack_of_the_first_call_is_kept(engine):
    def called():
        return torch.ones(4).relu()

    seen = observed(lambda: (called(), called()), stacks=True)
    assert row(seen, "aten::relu").stack[-1].endswith(" called")
    assert "test_ops.py" in row(seen, "aten::relu").stack[-1]


def test_inputs_in_lists_and_outputs_in_lists_are_counted(engine):
    seen = observed(lambda: torch.cat([torch.ones(2), torch.ones(2)]).split(2))
    assert row(seen, "aten::cat").input_dtypes == {"float32": 2}
    assert row(seen, "aten::split.Tensor").output_dtypes == {"float32": 2}


def test_custom_op_that_runs_when_timing_starts_is_counted_without_a_time(engine):
    timed = polycast.observe(timing=True)

    @torch.library.custom_op("polycast_observe::begins", mutates_args=())
    def begins(x: torch.Tensor) -> torch.Tensor:
        timed.__enter__()
        return x + x

    with polycast.observe() as seen:
        torch.ops.polycast_observe.begins(torch.ones(4))  # begins() itself passes by the dispatcher from torch 2.15 on
        timed.__exit__(None, None, None)
    assert (row(seen, "polycast_observe::begins").calls, row(seen, "polycast_observe::begins").seconds) == (1, {})


def test_an_op_under_a_dispatch_mode_is_counted_once(engine):
    with polycast.observe() as seen, polycast.autocast("cpu"), Seen():
        torch.ones(4).relu()
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    assert (row(seen, "aten::relu").calls, row(seen, "aten::mm").calls) == (1, 1)


def test_op_that_raises_is_counted(engine):
    observer = polycast.observe()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), observer as seen:
        torch.mm(torch.ones(4).relu().view(2, 2), torch.ones(3, 3))
    assert (row(seen, "aten::relu").calls, row(seen, "aten::mm").calls) == (1, 1)


def test_program_in_removed_directory_is_observed(engine, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    seen = observed(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)), stacks=True)
    assert "test_ops.py:" in seen.regions[0].where
    assert "test_ops.py:" in row(seen, "aten::mm").stack[-1]


def test_regions_are_counted_by_line(engine):
    with polycast.observe() as seen:
        for _ in range(2):
            with polycast.autocast("cpu"):
                torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    (region,) = seen.regions
    assert "test_ops.py:" in region.where
    found = region.device, region.dtype, region.enabled, region.entries, region.unused
    assert found == ("cpu", "bfloat16", True, 2, 0)
    assert region.ops >= 2


def test_stack_of_op_that_raises_is_kept(engine):
    def refuse(tensor):
        raise LookupError("refused")

    x = torch.ones(4, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(refuse, refuse)
    with polycast.observe(stacks=True) as seen, hooks, pytest.raises(LookupError, match="refused"):
        x.exp()
    assert "test_ops.py" in row(seen, "aten::exp").stack[-1]
