"""Findings about dtypes, regions, losses, inf and nan."""

from pathlib import Path

import pytest
import torch
from torch import nn

import polycast


def test_inf_is_found(engine, findings):
    (found,) = findings("nonfinite", lambda: torch.zeros(4).log(), nonfinite="record")
    assert found.remedy.startswith("It was computed in float32: a wider dtype does not help. Check its inputs")
    assert "policy" not in found.remedy
    assert found.ops == ("aten::log",)
    assert "the first op to turn finite inputs into inf (float32, forward); ops did so once" in found.what
    assert findings("nonfinite", lambda: torch.ones(4).log(), nonfinite="record") == []


REMEDIES = [
    (
        torch.float16,
        6e4,
        'float16 has less range than float32. Keep the op in float32, with `policy={"mul": "fp32"}`, or use bfloat16.',
    ),
    (torch.bfloat16, 3e38, "It was computed in bfloat16, which has the range of float32: a wider dtype does not help."),
    (torch.complex128, 1e308, "It was computed in complex128: a wider dtype does not help."),
]


def test_remedy_for_inf_depends_on_the_dtype(engine, findings, subtests):
    for dtype, value, remedy in REMEDIES:
        with subtests.test(dtype=dtype):
            x = torch.full((4,), value, dtype=dtype)
            (found,) = findings("nonfinite", lambda: x * 10, nonfinite="record")  # noqa: B023
            assert found.remedy.startswith(remedy)


def test_remedy_for_inf_in_backward_pass_is_not_a_policy(engine, findings):
    weight = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    (found,) = findings("nonfinite", lambda: weight.sqrt().sum().backward(), nonfinite="record")
    assert (
        found.remedy == "float16 has less range than float32. Scale the loss (`polycast.grad_scaler`), or use bfloat16."
    )


def test_emulated_dtype_is_found(engine, hand_made, findings):
    def run():
        with polycast.autocast("cpu"):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    table = polycast.plugin.get_backend("cpu").policies
    hand_made("cpu", default_dtype=torch.bfloat16, policies=table, slow_reason=lambda dtype: f"no {dtype} here")
    (found,) = findings("slow_dtype", run)
    assert (found.where, found.what) == ("cpu", "bfloat16 is emulated: no torch.bfloat16 here.")
    polycast.plugin.unregister_backend("cpu")
    hand_made("cpu", default_dtype=torch.bfloat16, policies=table)
    assert findings("slow_dtype", run) == []


def test_error_of_backend_about_emulation_is_ignored(engine, hand_made, findings, in_region):
    def slow_reason(dtype):
        raise OSError("no such file")

    hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=slow_reason)
    assert findings("slow_dtype", in_region(lambda: torch.ones(2).relu())) == []


def test_disabled_region_has_a_reason(engine, hand_made, findings, in_region):
    class Absent(type(hand_made("xpu"))):
        def availability(self):
            return polycast.plugin.Availability(False, "no device is plugged in")

    polycast.plugin.unregister_backend("xpu")
    polycast.plugin.register_backend(Absent("xpu"))

    def refused():
        with pytest.warns(polycast.errors.AutocastDisabledWarning), polycast.autocast("xpu"):
            pass

    (found,) = findings("disabled_region", refused)
    assert "test_findings_of_runs.py:" in found.where
    assert found.what == "the region for xpu is disabled, once: xpu is not available: no device is plugged in."

    def asked_for():
        with polycast.autocast("cpu", enabled=False):
            pass

    (found,) = findings("disabled_region", asked_for)
    assert found.what == "the region for cpu is disabled, once: enabled=False asks for that."
    assert findings("disabled_region", in_region(lambda: torch.ones(2).relu())) == []


def test_region_disabled_by_module_rule_has_a_reason(engine, findings, in_region):
    net = nn.Sequential(nn.Linear(2, 2))
    with polycast.apply_policy(net, polycast.Policy(modules={"0": "fp32"})):
        (found,) = findings("disabled_region", in_region(lambda: net(torch.ones(1, 2)), 2), net)
    assert found.what == "the region for cpu is disabled, 2 times: a module rule asks for that."


def test_unused_region_is_found(engine, findings, in_region):
    (found,) = findings("unused_region", in_region(lambda: None, 2))
    assert "conftest.py:" in found.where
    assert (found.count, found.what) == (
        2,
        "no op in the region for cpu reached autocast, every time.",
    )
    assert findings("unused_region", in_region(lambda: torch.ones(2).relu())) == []


def test_unused_region_of_a_library_is_where_the_program_enters_it(engine):
    with polycast.observe() as seen, polycast.plugin.LibraryRegion("cpu"):
        pass
    found = [found for found in seen.findings if found.kind != "slow_dtype"]
    assert [Path(each.where.partition(":")[0]).name for each in found] == [Path(__file__).name]


def test_region_around_compiled_code_is_used(engine):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(2, 8)
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad(), polycast.observe(net) as seen:
        for _ in range(2):
            with polycast.autocast("cpu", torch.float16), polycast.autocast("cpu", torch.bfloat16):
                assert compiled(x).dtype == torch.bfloat16
        with polycast.autocast("cpu"):
            pass
    assert [(region.dtype, region.unused, region.compiled) for region in seen.regions] == [
        ("float16", 0, 2),
        ("bfloat16", 0, 2),
        ("bfloat16", 1, 0),
    ]
    assert [found.count for found in seen.findings if found.kind == "unused_region"] == [1]


def test_region_with_ops_in_inner_region_is_used(engine, findings):
    def nested():
        with polycast.autocast("cpu"), polycast.autocast("cpu", torch.float16):
            torch.ones(2).relu()

    assert findings("unused_region", nested) == []


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (lambda y: (y * y).mean(), "MeanBackward0"),
        (lambda y: nn.functional.mse_loss(y, torch.zeros_like(y)), "aten::mse_loss"),
    ],
)
def test_loss_in_fast_dtype_is_found(engine, loss, op, findings):
    net, x = nn.Linear(8, 8), torch.ones(2, 8)
    policy = {"mse_loss": "passthrough"}

    def train(in_float32):
        def run():
            with polycast.autocast("cpu", policy=policy):
                y = net(x)
                value = loss(y.float() if in_float32 else y)
            value.backward()

        return run

    (found,) = findings("loss_in_fast_dtype", train(in_float32=False), net)
    assert found.ops == (op,)
    assert found.what == f"a loss is computed in bfloat16, by {op}, once."
    assert findings("loss_in_fast_dtype", train(in_float32=True), net) == []


def test_faultless_model_has_no_findings(engine):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), torch.ones(2, 8)

    def train():
        with polycast.autocast("cpu"):
            loss = nn.functional.cross_entropy(net(x), torch.zeros(2, dtype=torch.int64))
        loss.backward()

    with polycast.observe(net, nonfinite="record") as seen:
        train()
    assert [found for found in seen.findings if found.kind != "slow_dtype"] == []
