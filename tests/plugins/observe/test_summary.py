"""The summary of an observation and its report: which share comes first, and what is set apart and said once."""

import re

import pytest
import torch
from tests.plugins.models import Defined

import polycast
from polycast_plugins.observe.report import render
from polycast_plugins.observe.report.page import page_of


@pytest.fixture
def trained():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def train(**options):
        with polycast.observe(model, **options) as seen:
            with polycast.autocast("cpu"):
                loss = model(torch.ones(2, 8)).mul(2).sum()
            loss.backward()
            optimizer.step()
        return seen

    return train


def test_ops_outside_of_regions_are_apart(trained):
    seen = trained(timing=True)
    rows = {(row.op, row.phase): row.outside for row in page_of(seen.facts).ops}
    assert rows["aten::addcdiv_", "forward"]
    assert not any(outside for (op, phase), outside in rows.items() if phase == "backward" or op == "aten::linear")
    table, _, below = str(seen).partition("\nops outside of regions: ")
    assert "addcdiv_" not in table
    assert re.match(r"\d+ calls, [\d.]+ [mu]s: ", below)
    assert 0 < seen.facts.outside_time_share < 1
    text = render(page_of(seen.facts))
    closed = text.index('<details class="outside"><summary>Outside of regions: ')
    assert closed < text.index(">addcdiv_<")


def test_a_run_without_regions_has_no_ops_outside_of_them():
    with polycast.observe() as seen:
        torch.ones(1).exp()
    assert seen.facts.outside == ()
    assert "outside" not in str(seen)
    assert seen.headline.endswith(" calls of ops, no region was enabled; 0 casts of 0 bytes; no findings")


def test_shares_are_of_time_else_of_matmuls_else_of_ops(trained):
    assert re.match(r"[\d.]+% of the time in ops in bfloat16; ", trained(timing=True).headline)
    assert trained().headline.startswith("100% of the 512 FLOPs in matmuls in bfloat16; ")
    with polycast.observe() as seen, polycast.autocast("cpu"):
        torch.ones(2).mul(2)
    assert seen.headline.startswith("0% of the floating-point ops in bfloat16; ")


LEFT_OUT = {60: "pass, policy, by, outputs, casts, bytes", 80: "policy, by, outputs, bytes", 120: "by, bytes", 150: ""}


@pytest.mark.parametrize("width", LEFT_OUT)
def test_a_narrow_text_has_the_columns_that_fit_and_says_which_do_not(width):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    with polycast.observe(model, nonfinite="record") as seen:
        with polycast.autocast("cpu"):
            loss = model(torch.ones(2, 8)).mul(float("inf")).sum()
        loss.backward()
    text, left_out = seen.text(width), LEFT_OUT[width]
    assert [line for line in text.splitlines() if len(line) > width] == []
    columns, shown = (
        next(line.split() for line in each.splitlines() if line.startswith(" op ")) for each in (str(seen), text)
    )
    assert shown == [name for name in columns if name not in left_out.split(", ")]
    assert (f" left out to fit the width: {left_out} " in " ".join(text.split())) == bool(left_out)
    assert "left out" not in str(seen)


def test_a_remedy_is_given_once():
    linear = torch.nn.Linear(4, 4)
    with polycast.observe(linear, nonfinite="record", numerics=True) as seen, polycast.autocast("cpu", torch.float16):
        linear(torch.full((1, 4), 6e4) * torch.tensor([1.0, -1, 1, -1])).mul(6e4)
    kinds = [each.kind for each in seen.findings]
    assert {"nonfinite", "overflow"} <= {*kinds}
    assert len({each.remedy for each in seen.findings}) < len(kinds)
    remedies = [each.remedy for each in page_of(seen.facts).found]
    assert remedies.count("As for nonfinite.") == 1
    assert len({*remedies}) == len(remedies)
    assert " ".join(str(seen).split()).count("As for nonfinite.") == 1


@pytest.mark.parametrize("options", [{"nonfinite": "record"}, {"numerics": True}], ids=["nonfinite", "numerics"])
def test_a_log_and_an_observation_give_the_same_remedy_which_works(engine, options):
    linear = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(linear.weight, 3e4)  # overflows in float16; what its block returns does not
    block = Defined(lambda self, x: self.linear(x) / 1e6, linear=linear)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), block, torch.nn.Linear(4, 1))
    torch.nn.init.constant_(model[0].weight, 0.25)
    scaler = polycast.grad_scaler("cpu", torch.float16, init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = polycast.RunLog(model=model, schedule=1, **options)

    def run():
        with polycast.autocast("cpu", torch.float16):
            return model(torch.ones(2, 4)).float().sum()

    for _ in range(4):
        with log.step() as step:
            step.log(loss=run())
            optimizer.zero_grad()
            scaler.scale(run()).backward()
            scaler.step(optimizer)
            scaler.update()
    with polycast.observe(model, **options) as seen:
        run()
    found = [*log.history.findings, *seen.findings]
    assert {"skipped_steps", "overflow" if "numerics" in options else "nonfinite"} <= {each.kind for each in found}
    codes = {code for each in found for code in re.findall(r"`(polycast\.apply_policy.*?)`", each.remedy)}
    assert codes == {"polycast.apply_policy(model, polycast.Policy(modules={'1.linear': 'fp32'}))"}
    eval(codes.pop(), {"polycast": polycast, "model": model})
    assert run().isfinite()
