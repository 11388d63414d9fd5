"""Findings about casts, and the policies that they suggest."""

import json
import re

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast_plugins.observe import Observation


def test_repeated_casts_of_weights_are_found(engine, findings, in_region):
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.ones(1, 64)
    (found,) = findings("weights_cast_again", in_region(lambda: net(x), 3), net)
    again = 2 * 2 * (64 * 64 + 64 + 64 * 8 + 8)
    assert (found.where, found.module, found.count, found.bytes) == ("0 and 1 other module", "0", 8, again)
    assert found.bytes_per_second > 0
    assert found.what.startswith("weights were cast again 8 times although they had not changed: 18.7 KB, ")
    assert "cache=polycast.WeightCache()" in found.remedy
    assert findings("weights_cast_again", in_region(lambda: net(x), 3, cache=polycast.WeightCache()), net) == []


def test_trained_weights_have_no_finding(engine, findings):
    net, x = nn.Linear(8, 8), torch.ones(1, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train():
        for _ in range(3):
            with polycast.autocast("cpu"):
                loss = net(x).float().sum()
            loss.backward()
            optimizer.step()

    assert findings("weights_cast_again", train, net) == []


def test_round_trip_of_activation_is_found(engine, findings, in_region):
    kept = Defined(lambda self, x: x.float().exp().log())  # ends in float32, as a layer that is kept there does
    net, x = nn.Sequential(kept, nn.Linear(8, 8), nn.LogSoftmax(-1)), torch.ones(2, 8)
    policy = {"log_softmax": "fp32", "exp": "fp32", "log": "fp32"}
    (found,) = findings("round_trip", in_region(lambda: net(x), 2, policy=policy), net)
    assert found.ops == ("aten::linear", "aten::log_softmax.int")
    assert (found.where, found.count) == ("2", 2)
    assert found.what == (
        "an activation is cast to bfloat16 for aten::linear and back to float32 for aten::log_softmax.int, 2 times: "
        "128 bytes cast."
    )
    assert found.remedy == 'Compute both in one dtype: `policy={"linear": "fp32"}`.'
    stays = {**policy, "linear": "fp32"}
    assert findings("round_trip", in_region(lambda: net(x), 2, policy=stays), net) == []


def scaled(dtype):
    return Defined(lambda self, x: x * self.scale, scale=torch.ones(8, dtype=dtype))


def test_op_in_float32_by_one_input_is_found(engine, findings, in_region):
    x = torch.ones(2, 8)
    net = nn.Sequential(nn.Linear(8, 8), scaled(torch.float32))
    (found,) = findings("float32_by_one_input", in_region(lambda: net(x)), net)
    assert (found.where, found.ops, found.count, found.bytes) == ("1", ("aten::mul.Tensor",), 1, 64)
    assert "because one input is float32 and the others are bfloat16" in found.what
    net = nn.Sequential(nn.Linear(8, 8), scaled(torch.bfloat16))
    assert findings("float32_by_one_input", in_region(lambda: net(x)), net) == []


NARROW, WIDE = torch.ones(2, 4).bfloat16(), torch.ones(2, 4)
PROMOTED = {
    "of one input": (lambda: torch.cat([NARROW, NARROW, WIDE]), [("aten::cat",)]),
    "inside an op": (lambda: torch.vstack([NARROW, NARROW, WIDE]), [("aten::cat",)]),
    "of no input": (lambda: torch.cat([NARROW, NARROW]), []),
    "with a float32 policy": (lambda: nn.functional.mse_loss(NARROW, WIDE), []),
}


@pytest.mark.parametrize(("run", "ops"), PROMOTED.values(), ids=PROMOTED)
def test_promotion_by_one_input_is_found(engine, run, ops, findings, in_region):
    found = findings("float32_by_one_input", in_region(run))
    assert [(each.where, each.ops) for each in found] == [("outside of the model's modules", each) for each in ops]


def gelu(cast):
    return Defined(lambda self, x: nn.functional.gelu(x.float() if cast else x))


@pytest.mark.parametrize("cast", [True, False])
def test_unlisted_op_between_ops_in_fast_dtype_is_found(engine, cast, findings, in_region):
    net, x = nn.Sequential(nn.Linear(8, 8), gelu(cast), nn.Linear(8, 8)), torch.ones(2, 8)
    found = findings("unlisted_float32_op", in_region(lambda: net(x)), net)
    what = (
        "aten::gelu has no policy and runs in float32, once, between aten::linear and aten::linear, which run in "
        "bfloat16: 64 bytes of outputs, cast once, in 2."
    )
    remedy = "The program converts its input to float32. If aten::gelu may run in bfloat16, remove the conversion."
    ops = ("aten::linear", "aten::gelu", "aten::linear")
    assert [(each.ops, each.what, each.remedy) for each in found] == [(ops, what, remedy)] * cast


def rms_norm():
    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.weight

    return Defined(forward, weight=nn.Parameter(torch.ones(8)))


def attention(norm, consumers="qkv"):
    """Return a residual block, as in a transformer whose residuals stay in float32."""

    def forward(self, x):
        h = self.norm(x)
        first, *others = [linear(h) for linear in self.consumers.values()]
        return x + sum(others, first)

    return Defined(forward, norm=norm, consumers=nn.ModuleDict({name: nn.Linear(8, 8) for name in consumers}))


def add_of_two(self, x):
    h = self.norm(x)
    return self.linear(h) + self.conv(h)


BLOCKS = {
    "few": (
        lambda: attention(rms_norm()),
        ("aten::linear", "cast 3 times, in 1.consumers.q, 1.consumers.k, 1.consumers.v."),
    ),
    "many": (
        lambda: attention(rms_norm(), "abcdefghi"),
        ("aten::linear", f"cast 9 times, in {', '.join(f'1.consumers.{each}' for each in 'abcd')} and 5 more."),
    ),
    "several kinds": (
        lambda: Defined(add_of_two, norm=rms_norm(), linear=nn.Linear(8, 8), conv=nn.Conv1d(16, 16, 1)),
        ("aten::linear and aten::conv1d", "cast 2 times, in 1.linear, 1.conv."),
    ),
}


@pytest.mark.parametrize(("block", "said"), BLOCKS.values(), ids=BLOCKS)
def test_unlisted_op_is_found_once_with_the_modules_that_cast_its_output(engine, block, said, findings, in_region):
    net, x = nn.Sequential(nn.Linear(8, 8), block()), torch.randn(4, 16, 8)
    with polycast.observe(net[1]) as inner:
        (found,) = findings("unlisted_float32_op", in_region(lambda: net(x)), net)
    assert (found.where, found.module, found.count) == ("1.norm", "1.norm", 1)
    assert found.ops[:2] == ("aten::linear", "aten::mul.Tensor")
    consumers, casts = said
    assert f"between aten::linear and {consumers}, which run in bfloat16" in found.what
    assert found.what.endswith(f"2.0 KB of outputs, {casts}")
    # Each observer names the producer itself.
    assert [each.module for each in inner.findings if each.kind == "unlisted_float32_op"] == ["norm"]


def a_run(net, x, policy=None):
    with torch.no_grad(), polycast.observe(net) as seen, polycast.autocast("cpu", policy=policy):
        net(x)
    return seen


def offered(seen):
    """Return the policies that the remedies of a run offer."""
    return {text for found in seen.findings for text in re.findall(r"policy=(\{.*?\})", found.remedy)}


def normed():
    return Defined(lambda self, x: self.norm(x + self.dense(x)), dense=nn.Linear(8, 8), norm=nn.LayerNorm(8))


def mixed():
    """Return a model that concatenates what is in float32 with what is not, as rotary embeddings do."""
    return Defined(lambda self, x: torch.cat([x, self.dense(x)], 0), dense=nn.Linear(8, 8))


NETS = {
    "norm before": lambda: [attention(nn.LayerNorm(8)), attention(nn.LayerNorm(8)), nn.Linear(8, 8)],
    "one consumer": lambda: [attention(nn.LayerNorm(8), "c"), attention(nn.LayerNorm(8), "c"), nn.Linear(8, 8)],
    "norm after": lambda: [normed(), attention(nn.Identity()), normed(), attention(nn.Identity()), nn.Linear(8, 8)],
    "custom norm": lambda: [nn.Linear(8, 8), attention(rms_norm()), attention(rms_norm())],
    "scaled": lambda: [nn.Linear(8, 8), scaled(torch.float32), nn.Linear(8, 8)],
    "converted": lambda: [nn.Linear(8, 8), gelu(True), nn.Linear(8, 8)],
    "concatenated": lambda: [mixed(), nn.Linear(8, 8), mixed(), nn.LogSoftmax(-1)],
}


@pytest.mark.parametrize("name", NETS)
def test_suggested_policy_saves_casts(engine, name):
    torch.manual_seed(0)
    net, x = nn.Sequential(*NETS[name]()), torch.randn(4, 16, 8)
    plain = a_run(net, x)
    for policy in offered(plain):
        assert a_run(net, x, json.loads(policy)).total.cast_bytes < plain.total.cast_bytes


def test_policy_that_moves_a_cast_is_not_suggested(engine):
    net, x = nn.Sequential(*NETS["one consumer"]()), torch.randn(4, 16, 8)
    seen, moved = a_run(net, x), a_run(net, x, {"layer_norm": "lower_precision_fp"})
    assert moved.total.cast_bytes >= seen.total.cast_bytes
    where = {found.ops[1]: found.where for found in seen.findings if found.kind == "unlisted_float32_op"}
    assert where == {"aten::add.Tensor": "1", "aten::layer_norm": "1.norm"}
    assert offered(seen) == {'{"add": "lower_precision_fp"}'}


def test_policy_that_removes_the_finding_is_suggested(engine):
    net, x = nn.Sequential(*NETS["norm after"]()), torch.randn(4, 16, 8)
    (policy,) = offered(a_run(net, x))
    after = a_run(net, x, json.loads(policy))
    assert [found.kind for found in after.findings if found.kind.endswith(("_op", "_input"))] == []


def test_without_flows_no_policy_is_suggested(engine):
    net, x = nn.Sequential(*NETS["norm before"]()), torch.randn(4, 16, 8)
    said = a_run(net, x).to_dict()
    said["flows"] = []
    seen = Observation.from_dict(said)
    assert "unlisted_float32_op" in {found.kind for found in seen.findings}
    assert offered(seen) == set()
    assert not any(found.remedy.startswith("Leave it") for found in seen.findings)


def test_no_policy_is_suggested_for_op_that_cannot_have_one(engine):
    in_place = Defined(lambda self, x: x.float().add_(1))
    net, x = nn.Sequential(nn.Linear(8, 8), in_place, nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 16, 8)
    seen = a_run(net, x)
    assert [found.ops[1] for found in seen.findings if found.kind == "unlisted_float32_op"] == ["aten::add_.Tensor"]
    assert offered(seen) == set()
