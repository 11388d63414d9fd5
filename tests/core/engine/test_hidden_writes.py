"""Running statistics, which batch norms write though their schemas do not say so, are written under every policy."""

import pytest
import torch
from torch import nn

import polycast
from polycast.policy import schemas

X = torch.linspace(-1, 2, 4 * 3 * 5 * 5).reshape(4, 3, 5, 5) ** 2


def call(op, x, mean, var, training):
    weight, bias = torch.ones(3, dtype=mean.dtype), torch.zeros(3, dtype=mean.dtype)
    if op == "_batch_norm_impl_index":
        return torch._batch_norm_impl_index(x, weight, bias, mean, var, training, 0.5, 1e-5, False)[0]
    if op == "native_batch_norm":
        return torch.native_batch_norm(x, weight, bias, mean, var, training, 0.5, 1e-5)[0]
    return getattr(torch, op)(x, weight, bias, mean, var, training, 0.5, 1e-5, False)


def stats(dtype):
    return torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)


OPS = ["batch_norm", "instance_norm", "native_batch_norm", "_batch_norm_impl_index"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("policy", ["fp32", "promote", "lower_precision_fp", "match"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_running_statistics_are_written_in_their_own_dtype(engine, op, policy, dtype):
    mean, var = stats(dtype)
    x = X if dtype is torch.bfloat16 else X.bfloat16()
    with polycast.autocast("cpu", policy={op: policy}):
        y = call(op, x, mean, var, True)
    computed_in = torch.bfloat16 if policy == "lower_precision_fp" else torch.float32
    expected = [each.to(computed_in) for each in stats(dtype)]
    result = call(op, x.to(computed_in), *expected, True)
    assert torch.equal(y, result)
    assert (mean.dtype, var.dtype) == (dtype, dtype)
    assert torch.equal(mean, expected[0].to(dtype))
    assert torch.equal(var, expected[1].to(dtype))
    assert mean.count_nonzero() == 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("policy", ["fp32", "match"])
def test_statistics_that_are_only_read_keep_their_version(engine, op, policy):
    mean, var = stats(torch.bfloat16)
    with polycast.autocast("cpu", policy={op: policy}):
        y = call(op, X, mean, var, False)
    assert torch.equal(y, call(op, X, *stats(torch.float32), False))
    assert (mean._version, var._version) == (0, 0)
    assert torch.equal(mean, torch.zeros(3, dtype=torch.bfloat16))


def test_a_norm_can_be_used_outside_of_the_region_too(engine):
    norm = nn.BatchNorm2d(3).bfloat16()
    outside = norm(X.bfloat16())
    with polycast.autocast("cpu", policy={"batch_norm": "fp32"}):
        inside = norm(X)
    (outside.float().sum() + inside.sum()).backward()
    assert norm.running_mean._version == 0


def test_statistics_made_in_inference_mode_are_written(engine):
    with torch.inference_mode():
        mean, var = stats(torch.bfloat16)
    with torch.no_grad(), polycast.autocast("cpu", policy={"batch_norm": "fp32"}):
        call("batch_norm", X, mean, var, True)
    expected = stats(torch.float32)
    call("batch_norm", X, *expected, True)
    assert torch.equal(mean, expected[0].bfloat16())


def test_one_tensor_may_be_both_statistics(engine):
    both, expected = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3)
    with polycast.autocast("cpu", policy={"batch_norm": "fp32"}):
        call("batch_norm", X, both, both, True)
    call("batch_norm", X, expected, expected, True)
    assert torch.equal(both, expected.bfloat16())


def test_a_cached_cast_of_a_written_statistic_is_dropped(engine):
    mean, var = (nn.Parameter(each, requires_grad=False) for each in stats(torch.float32))
    cache = polycast.WeightCache()
    with torch.no_grad(), polycast.autocast("cpu", cache=cache, policy={"batch_norm": "lower_precision_fp"}):
        before = mean.reshape(1, 3) @ torch.eye(3)
        call("batch_norm", X, mean, var, True)
        after = mean.reshape(1, 3) @ torch.eye(3)
    assert before.count_nonzero() == 0
    assert torch.equal(after.float(), mean.reshape(1, 3))


def test_a_norm_without_statistics_is_cast(engine):
    with polycast.autocast("cpu", policy={"batch_norm": "fp32"}):
        y = nn.functional.batch_norm(X.bfloat16(), None, None, training=True)
    assert y.dtype is torch.float32


def test_a_compiled_norm_writes_its_statistics(engine):
    norm, expected = nn.BatchNorm2d(3).bfloat16(), nn.BatchNorm2d(3)
    compiled = torch.compile(norm, backend="aot_eager")
    with polycast.autocast("cpu", policy={"batch_norm": "fp32"}):
        compiled(X)
    expected(X)
    assert torch.equal(norm.running_mean, expected.running_mean.bfloat16())


def test_all_functional_ops_with_running_statistics_are_listed():
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        names = [argument.name for argument in schema.arguments]
        if schema.name.startswith("aten::") and "running_mean" in names and not schema.is_mutable:
            found.add(schema.name)
    only_read = {name for name in found if name.endswith(("_backward", "_functional", "_no_training", "_no_update"))}
    assert found - only_read == schemas._HIDDEN_WRITES.keys()
