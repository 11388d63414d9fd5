"""Findings: each is there for a model that has the fault, and not for one that has not."""

import json
import re

import pytest
import torch
from torch import nn

import polycast


def findings(kind, run, model=None, **options):
    with polycast.observe(model, **options) as seen:
        run()
    return [found for found in seen.findings if found.kind == kind]


def in_region(call, count=1, **arguments):
    def run():
        with torch.no_grad():
            for _ in range(count):
                with polycast.autocast("cpu", **arguments):
                    call()

    return run


def test_weights_that_are_cast_again_and_again(engine):
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.ones(1, 64)
    (found,) = findings("weights_cast_again", in_region(lambda: net(x), 3), net)
    again = 2 * 2 * (64 * 64 + 64 + 64 * 8 + 8)
    assert (found.where, found.module, found.count, found.bytes) == ("0 and 1 other module", "0", 8, again)
    assert found.bytes_per_second > 0
    assert found.what.startswith("weights were cast again 8 times although they had not changed: 18.7 KB, ")
    assert "cache=polycast.WeightCache()" in found.remedy
    assert findings("weights_cast_again", in_region(lambda: net(x), 3, cache=polycast.WeightCache()), net) == []


def test_weights_that_are_trained_are_cast_once_a_step(engine):
    net, x = nn.Linear(8, 8), torch.ones(1, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train():
        for _ in range(3):
            with polycast.autocast("cpu"):
                loss = net(x).float().sum()
            loss.backward()
            optimizer.step()

    assert findings("weights_cast_again", train, net) == []


class Norm(nn.Module):
    """Ends in float32, as a layer that is kept there does."""

    def forward(self, x):
        return x.float().exp().log()


def test_an_activation_that_goes_to_the_fast_dtype_and_back(engine):
    net, x = nn.Sequential(Norm(), nn.Linear(8, 8), nn.LogSoftmax(-1)), torch.ones(2, 8)
    policy = {"log_softmax": "fp32", "exp": "fp32", "log": "fp32"}
    (found,) = findings("round_trip", in_region(lambda: net(x), 2, policy=policy), net)
    assert found.ops == ("aten::linear", "aten::log_softmax.int")
    assert (found.where, found.count) == ("2", 2)
    assert found.what == (
        "an activation is cast to bfloat16 for aten::linear and back to float32 for aten::log_softmax.int, 2 times: "
        "128 bytes cast."
    )
    assert found.remedy == 'Compute both in one dtype: policy={"linear": "fp32"}.'
    stays = {**policy, "linear": "fp32"}
    assert findings("round_trip", in_region(lambda: net(x), 2, policy=stays), net) == []


class Scaled(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.scale = torch.ones(8, dtype=dtype)

    def forward(self, x):
        return x * self.scale


def test_an_op_in_float32_because_of_one_input(engine):
    x = torch.ones(2, 8)
    net = nn.Sequential(nn.Linear(8, 8), Scaled(torch.float32))
    (found,) = findings("float32_by_one_input", in_region(lambda: net(x)), net)
    assert (found.where, found.ops, found.count, found.bytes) == ("1", ("aten::mul.Tensor",), 1, 64)
    assert "because one input is float32 and the others are bfloat16" in found.what
    net = nn.Sequential(nn.Linear(8, 8), Scaled(torch.bfloat16))
    assert findings("float32_by_one_input", in_region(lambda: net(x)), net) == []


def test_an_op_that_promotes_because_of_one_input(engine):
    narrow, wide = torch.ones(4).bfloat16(), torch.ones(4)
    (found,) = findings("float32_by_one_input", in_region(lambda: torch.cat([narrow, narrow, wide])))
    assert (found.where, found.ops) == ("outside of the model's modules", ("aten::cat",))
    assert findings("float32_by_one_input", in_region(lambda: torch.cat([narrow, narrow]))) == []


def test_an_op_that_a_table_has_in_float32_is_none(engine):
    narrow, wide = torch.ones(2, 4).bfloat16(), torch.ones(2, 4)
    loss = nn.functional.mse_loss
    assert findings("float32_by_one_input", in_region(lambda: loss(narrow, wide))) == []


class Activation(nn.Module):
    def __init__(self, cast):
        super().__init__()
        self.cast = cast

    def forward(self, x):
        return nn.functional.gelu(x.float() if self.cast else x)


@pytest.mark.parametrize("cast", [True, False])
def test_an_unlisted_op_in_float32_between_two_that_are_not(engine, cast):
    net, x = nn.Sequential(nn.Linear(8, 8), Activation(cast), nn.Linear(8, 8)), torch.ones(2, 8)
    found = findings("unlisted_float32_op", in_region(lambda: net(x)), net)
    assert [each.ops for each in found] == [("aten::linear", "aten::gelu", "aten::linear")] * cast
    for each in found:
        assert each.what == (
            "aten::gelu has no policy and runs in float32, once, between aten::linear and aten::linear, which run in "
            "bfloat16: 64 bytes of outputs, cast once, in 2."
        )
        assert each.remedy == (
            "The program converts its input to float32. If aten::gelu may run in bfloat16, remove the conversion."
        )


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.weight


class Attention(nn.Module):
    """A residual block, as in a transformer whose residuals stay in float32."""

    def __init__(self, norm, consumers=("q", "k", "v")):
        super().__init__()
        self.norm = norm
        self.consumers = nn.ModuleDict({name: nn.Linear(8, 8) for name in consumers})

    def forward(self, x):
        h = self.norm(x)
        first, *others = [linear(h) for linear in self.consumers.values()]
        return x + sum(others, first)


def test_an_unlisted_op_is_found_once_in_the_module_that_runs_it_with_those_that_cast_what_it_returns(engine):
    net, x = nn.Sequential(nn.Linear(8, 8), Attention(RMSNorm())), torch.randn(4, 16, 8)
    (found,) = findings("unlisted_float32_op", in_region(lambda: net(x)), net)
    assert (found.where, found.module, found.count) == ("1.norm", "1.norm", 1)
    assert found.ops == ("aten::linear", "aten::mul.Tensor", "aten::linear")
    assert found.what.endswith("2.0 KB of outputs, cast 3 times, in 1.consumers.q, 1.consumers.k, 1.consumers.v.")


def test_ops_of_several_kinds_that_take_what_an_unlisted_op_returned_are_in_one_finding(engine):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear, self.conv = RMSNorm(), nn.Linear(8, 8), nn.Conv1d(4, 4, 1)

        def forward(self, x):
            h = self.norm(x)
            return self.linear(h) + self.conv(h)

    net, x = nn.Sequential(nn.Linear(8, 8), Both()), torch.randn(2, 4, 8)
    (found,) = findings("unlisted_float32_op", in_region(lambda: net(x)), net)
    assert (found.module, found.count) == ("1.norm", 1)
    assert "between aten::linear and aten::linear and aten::conv1d, which run in bfloat16" in found.what
    assert found.what.endswith("256 bytes of outputs, cast 2 times, in 1.linear, 1.conv.")


def test_consumers_of_an_unlisted_op_that_are_many_are_counted(engine):
    names = [f"c{i}" for i in range(9)]
    net, x = nn.Sequential(nn.Linear(8, 8), Attention(RMSNorm(), names)), torch.randn(4, 16, 8)
    (found,) = findings("unlisted_float32_op", in_region(lambda: net(x)), net)
    assert found.what.endswith("cast 9 times, in " + ", ".join(f"1.consumers.c{i}" for i in range(4)) + " and 5 more.")


def test_two_observers_know_the_producer_by_their_own_names(engine):
    net, x = nn.Sequential(nn.Linear(8, 8), Attention(RMSNorm())), torch.randn(4, 16, 8)
    with polycast.observe(net[1]) as inner:
        (found,) = findings("unlisted_float32_op", in_region(lambda: net(x)), net)
    assert [each.module for each in inner.findings if each.kind == "unlisted_float32_op"] == ["norm"]
    assert found.module == "1.norm"


def a_run(net, x, policy=None):
    with torch.no_grad(), polycast.observe(net) as seen, polycast.autocast("cpu", policy=policy):
        net(x)
    return seen


def offered(seen):
    """Return the policies that the remedies of a run offer."""
    return {text for found in seen.findings for text in re.findall(r"policy=(\{.*?\})", found.remedy)}


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.dense(x))


class Mixed(nn.Module):
    """Concatenates what is in float32 with what is not, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cat([x, self.dense(x)], 0)


NETS = {
    "norm before": lambda: [Attention(nn.LayerNorm(8)), Attention(nn.LayerNorm(8)), nn.Linear(8, 8)],
    "one consumer": lambda: [Attention(nn.LayerNorm(8), ["c"]), Attention(nn.LayerNorm(8), ["c"]), nn.Linear(8, 8)],
    "norm after": lambda: [PostNorm(), Attention(nn.Identity()), PostNorm(), Attention(nn.Identity()), nn.Linear(8, 8)],
    "custom norm": lambda: [nn.Linear(8, 8), Attention(RMSNorm()), Attention(RMSNorm())],
    "scaled": lambda: [nn.Linear(8, 8), Scaled(torch.float32), nn.Linear(8, 8)],
    "converted": lambda: [nn.Linear(8, 8), Activation(True), nn.Linear(8, 8)],
    "concatenated": lambda: [Mixed(), nn.Linear(8, 8), Mixed(), nn.LogSoftmax(-1)],
}


@pytest.mark.parametrize("name", NETS)
def test_a_policy_that_a_remedy_offers_has_fewer_bytes_cast(engine, name):
    torch.manual_seed(0)
    net, x = nn.Sequential(*NETS[name]()), torch.randn(4, 16, 8)
    plain = a_run(net, x)
    for policy in offered(plain):
        assert a_run(net, x, json.loads(policy)).total.cast_bytes < plain.total.cast_bytes


def test_a_policy_that_only_moves_a_cast_is_not_offered(engine):
    net, x = nn.Sequential(*NETS["one consumer"]()), torch.randn(4, 16, 8)
    seen = a_run(net, x)
    moved = a_run(net, x, {"layer_norm": "lower_precision_fp"})
    assert moved.total.cast_bytes >= seen.total.cast_bytes
    where = {found.ops[1]: found.where for found in seen.findings if found.kind == "unlisted_float32_op"}
    assert where == {"aten::add.Tensor": "1", "aten::layer_norm": "1.norm"}
    assert offered(seen) == {'{"add": "lower_precision_fp"}'}


def test_a_policy_with_which_a_finding_is_gone_is_offered(engine):
    net, x = nn.Sequential(*NETS["norm after"]()), torch.randn(4, 16, 8)
    (policy,) = offered(a_run(net, x))
    after = a_run(net, x, json.loads(policy))
    assert [found.kind for found in after.findings if found.kind.endswith(("_op", "_input"))] == []


def test_without_the_flows_no_policy_is_offered(engine):
    net, x = nn.Sequential(*NETS["norm before"]()), torch.randn(4, 16, 8)
    said = a_run(net, x).to_dict()
    del said["flows"]  # which older versions did not write
    seen = polycast.Observation.from_dict(said)
    assert "unlisted_float32_op" in {found.kind for found in seen.findings}
    assert offered(seen) == set()
    assert not any(found.remedy.startswith("Leave it") for found in seen.findings)


def test_no_policy_is_offered_for_an_op_that_can_have_none(engine):
    class InPlace(nn.Module):
        def forward(self, x):
            return x.float().add_(1)

    net, x = nn.Sequential(nn.Linear(8, 8), InPlace(), nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 16, 8)
    seen = a_run(net, x)
    assert [found.ops[1] for found in seen.findings if found.kind == "unlisted_float32_op"] == ["aten::add_.Tensor"]
    assert offered(seen) == set()


def test_inf_or_nan(engine):
    (found,) = findings("nonfinite", lambda: torch.zeros(4).log(), nonfinite="record")
    assert found.remedy.startswith("It was computed in float32: a wider dtype does not help. Check its inputs")
    assert "policy" not in found.remedy
    assert found.ops == ("aten::log",)
    assert "the first op to turn finite inputs into inf (float32, forward); ops did so once" in found.what
    assert findings("nonfinite", lambda: torch.ones(4).log(), nonfinite="record") == []


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (
            torch.float16,
            'float16 has less range than float32. Keep the op in float32, with policy={"mul": "fp32"}, use',
        ),
        (torch.bfloat16, "It was computed in bfloat16, which has the range of float32: a wider dtype does not help."),
    ],
)
def test_what_to_do_about_inf_depends_on_the_dtype_that_it_was_computed_in(engine, dtype, remedy):
    x = torch.full((4,), 6e4 if dtype is torch.float16 else 3e38, dtype=dtype)
    (found,) = findings("nonfinite", lambda: x * 10, nonfinite="record")
    assert found.remedy.startswith(remedy)


def test_what_to_do_about_inf_in_the_backward_pass_is_no_policy(engine):
    weight = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    (found,) = findings("nonfinite", lambda: weight.sqrt().sum().backward(), nonfinite="record")
    assert (
        found.remedy == "float16 has less range than float32. Scale the loss (polycast.grad_scaler), or use bfloat16."
    )


def test_a_dtype_that_the_device_emulates(engine, hand_made):
    def run():
        with polycast.autocast("cpu"):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    table = polycast.get_backend("cpu").policies
    hand_made("cpu", default_dtype=torch.bfloat16, policies=table, slow_reason=lambda dtype: f"no {dtype} here")
    (found,) = findings("slow_dtype", run)
    assert (found.where, found.what) == ("cpu", "bfloat16 is emulated: no torch.bfloat16 here.")
    polycast.unregister_backend("cpu")
    hand_made("cpu", default_dtype=torch.bfloat16, policies=table)
    assert findings("slow_dtype", run) == []


def test_a_backend_that_cannot_say_whether_it_emulates_is_let_be(engine, hand_made):
    def slow_reason(dtype):
        raise OSError("no such file")

    hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=slow_reason)
    assert findings("slow_dtype", in_region(lambda: torch.ones(2).relu())) == []


def test_a_region_that_is_disabled_says_why(engine, hand_made):
    class Absent(type(hand_made("xpu"))):
        def availability(self):
            return polycast.Availability(False, "no device is plugged in")

    polycast.unregister_backend("xpu")
    polycast.register_backend(Absent("xpu"))

    def refused():
        with pytest.warns(polycast.AutocastDisabledWarning), polycast.autocast("xpu"):
            pass

    (found,) = findings("disabled_region", refused)
    assert "test_findings.py:" in found.where
    assert found.what == "the region for xpu is disabled, once: xpu is not available: no device is plugged in."

    def asked_for():
        with polycast.autocast("cpu", enabled=False):
            pass

    (found,) = findings("disabled_region", asked_for)
    assert found.what == "the region for cpu is disabled, once: enabled=False asks for that."
    assert findings("disabled_region", in_region(lambda: torch.ones(2).relu())) == []


def test_a_region_that_a_rule_for_a_module_disables_says_so(engine):
    net = nn.Sequential(nn.Linear(2, 2))
    with polycast.apply_policy(net, polycast.Policy(modules={"0": "fp32"})):
        (found,) = findings("disabled_region", in_region(lambda: net(torch.ones(1, 2)), 2), net)
    assert found.what == "the region for cpu is disabled, 2 times: a module rule asks for that."


def test_a_region_that_never_ran_an_op(engine):
    (found,) = findings("unused_region", in_region(lambda: None, 2))
    assert "test_findings.py:" in found.where
    assert (found.count, found.what) == (
        2,
        "no op in the region for cpu reached autocast, every time.",
    )
    assert findings("unused_region", in_region(lambda: torch.ones(2).relu())) == []


def test_a_region_around_compiled_code_is_used(engine):
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


def test_a_region_that_runs_ops_in_another_inside_it_is_used(engine):
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
def test_a_loss_in_the_fast_dtype(engine, loss, op):
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


def test_a_model_without_faults_has_no_findings(engine):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), torch.ones(2, 8)

    def train():
        with polycast.autocast("cpu"):
            loss = nn.functional.cross_entropy(net(x), torch.zeros(2, dtype=torch.int64))
        loss.backward()

    with polycast.observe(net, nonfinite="record") as seen:
        train()
    assert [found for found in seen.findings if found.kind != "slow_dtype"] == []
