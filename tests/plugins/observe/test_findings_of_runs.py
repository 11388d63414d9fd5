"""Findings about dtypes, regions, losses, inf and nan."""

from pathlib import Path

import pytest
import torch
from torch import nn

import polycast


def test_inf_is_found(engine, findings):
    (found,) = findings("nonfinite", lambda: torch.zeros(4).log(), nonfinite="record")
    assert found.ops == ("aten::log",)
    assert "the first op to turn finite inputs into inf (float32, forward); ops did so once" in found.what
    assert findings("nonfinite", lambda: torch.ones(4).log(), nonfinite="record") == []


def full(value, dtype):
    return torch.full((4,), value, dtype=dtype)


def backward_of_sqrt():
    full(0, torch.float16).requires_grad_().sqrt().sum().backward()


NARROW, WIDE = "float16 has less range than float32. ", ": a wider dtype does not help. Check its inputs"
REMEDIES = [
    (lambda: full(6e4, torch.float16) * 10, f'{NARROW}Keep the op in float32, with `policy={{"mul": "fp32"}}`, or use'),
    (lambda: full(6e4, torch.float16).mul_(10), f"{NARROW}Create the tensor that it writes in float32, or use"),
    (backward_of_sqrt, f"{NARROW}Scale the loss (`polycast.grad_scaler`), or use"),
    (lambda: full(3e38, torch.bfloat16) * 10, f"It was computed in bfloat16, which has the range of float32{WIDE}"),
    (lambda: full(0, torch.float32).log(), f"It was computed in float32{WIDE}"),
    (lambda: full(1e308, torch.complex128) * 10, f"It was computed in complex128{WIDE}"),
]


def test_remedy_for_inf_depends_on_the_op_and_the_dtype(engine, findings, subtests):
    for run, remedy in REMEDIES:
        with subtests.test(remedy=remedy):
            (found,) = findings("nonfinite", run, nonfinite="record")
            if remedy.startswith(NARROW):
                assert found.remedy == f"{remedy} bfloat16."
            else:
                assert found.remedy.startswith(remedy)
                assert "policy" not in found.remedy


def test_emulated_dtype_is_found(engine, other_cpu, findings, in_region):
    def fails(dtype):
        raise OSError("no such file")

    run = in_region(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)))
    other_cpu(slow_reason=lambda dtype: f"no {dtype} here")
    (found,) = findings("slow_dtype", run)
    assert (found.where, found.what) == ("cpu", "bfloat16 is emulated: no torch.bfloat16 here.")
    for slow_reason in (lambda dtype: None, fails):
        other_cpu(slow_reason=slow_reason)
        assert findings("slow_dtype", run) == []


def test_disabled_region_has_a_reason(engine, hand_made, findings, in_region):
    hand_made("xpu", availability=lambda: polycast.plugin.Availability(False, "no device is plugged in"))

    def refused():
        with pytest.warns(polycast.errors.AutocastDisabledWarning), polycast.autocast("xpu"):
            pass

    (found,) = findings("disabled_region", refused)
    assert "test_findings_of_runs.py:" in found.where
    assert found.what == "the region for xpu is disabled, once: xpu is not available: no device is plugged in."
    (found,) = findings("disabled_region", in_region(lambda: None, enabled=False))
    assert found.what == "the region for cpu is disabled, once: enabled=False asks for that."
    net = nn.Sequential(nn.Linear(2, 2))
    with polycast.apply_policy(net, polycast.Policy(modules={"0": "fp32"})):
        (found,) = findings("disabled_region", in_region(lambda: net(torch.ones(1, 2)), 2), net)
    assert found.what == "the region for cpu is disabled, 2 times: a module rule asks for that."
    assert findings("disabled_region", in_region(lambda: torch.ones(2).relu())) == []


def test_unused_region_is_found(engine, findings, in_region):
    (found,) = findings("unused_region", in_region(lambda: None, 2))
    assert "conftest.py:" in found.where
    assert (found.count, found.what) == (2, "no op in the region for cpu reached autocast, every time.")
    assert findings("unused_region", in_region(lambda: torch.ones(2).relu())) == []
    assert findings("unused_region", in_region(in_region(lambda: torch.ones(2).relu(), dtype=torch.float16))) == []


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


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (lambda y: (y * y).mean(), "MeanBackward0"),
        (lambda y: nn.functional.mse_loss(y, torch.zeros_like(y)), "aten::mse_loss"),
    ],
)
def test_loss_in_fast_dtype_is_found(engine, loss, op, findings):
    net, x = nn.Linear(8, 8), torch.ones(2, 8)

    def train(dtype):
        with polycast.autocast("cpu", policy={"mse_loss": "passthrough"}):
            value = loss(net(x).to(dtype))
        value.backward()

    (found,) = findings("loss_in_fast_dtype", lambda: train(torch.bfloat16), net)
    assert (found.ops, found.what) == ((op,), f"a loss is computed in bfloat16, by {op}, once.")
    assert findings("loss_in_fast_dtype", lambda: train(torch.float32), net) == []


def test_faultless_model_has_no_findings(engine):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), torch.ones(2, 8)
    with polycast.observe(net, nonfinite="record") as seen:
        with polycast.autocast("cpu"):
            loss = nn.functional.cross_entropy(net(x), torch.zeros(2, dtype=torch.int64))
        loss.backward()
    assert [found for found in seen.findings if found.kind != "slow_dtype"] == []
